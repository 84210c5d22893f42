"""torch.autocast, around a step or inside of a ``forward``: every plan does with it what one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.modes import BATCH, MODES, own
from helpers.ranks import run_ranks
from helpers.training import batch_of, config_of, relative
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.checkpoint.state_dict import full_state_dict, load_full_state_dict
from colossus.context.parallel_context import ParallelContext
from colossus.gradients.buckets import gradient_sum_axes

HIDDEN, WIDE = 12, 24


class Mixed(nn.Module):
    """Linears alone and in a pair, and one that is left out of autocast."""

    def __init__(self, here: Any, column: dict[str, str], row: dict[str, str]) -> None:
        super().__init__()
        self.first = here.Linear(HIDDEN, HIDDEN)
        self.up, self.down = here.Linear(HIDDEN, WIDE, **column), here.Linear(WIDE, HIDDEN, **row)
        self.exact = here.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.down(torch.relu(self.up(self.first(x))))
            with torch.autocast("cpu", enabled=False):
                return self.exact(x.to(self.exact.weight.dtype)), x


def small_numbers(like: Tensor, seed: int) -> Tensor:
    """-1, 0 and 1, mostly 0: bfloat16 has all their products and sums, whoever adds them in whatever order."""
    return torch.randint(-3, 4, like.shape, generator=torch.Generator().manual_seed(seed)).div(3, rounding_mode="trunc")


def exact_twin(dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    twin = Mixed(nn, {}, {}).to(dtype)
    twin.load_state_dict({name: small_numbers(value, i) for i, (name, value) in enumerate(twin.state_dict().items())})
    x = small_numbers(torch.empty(BATCH, 2, HIDDEN), 100).to(dtype).requires_grad_()
    out, _ = twin(x)
    (out * small_numbers(out, 101)).sum().backward()
    return twin, x, out


@pytest.mark.rest("1d", "2.5d_depth2", "2d")
@pytest.mark.parametrize("mode", ["1d", "1d_sequence", "2d", "2.5d_depth2", "3d"])
def test_products_are_taken_in_bfloat16_and_gradients_are_not(mode: str) -> None:
    twin, whole, expected = exact_twin(torch.float32)
    for mine, wide in zip(twin.parameters(), exact_twin(torch.float64)[0].parameters(), strict=True):
        assert torch.equal(mine.grad.double(), wide.grad), "the numbers of this test are too large for bfloat16"

    def body(context: ParallelContext) -> list[str]:
        found = []
        model: Any = colossus.build(lambda: Mixed(layers, {"split": "column"}, {"split": "row"}), context)
        load_full_state_dict(model, twin.state_dict(), context)
        x = own(context, whole.detach()).clone().requires_grad_()
        out, narrow = model(x)
        found += [] if (out.dtype, narrow.dtype) == (torch.float32, torch.bfloat16) else [f"dtypes {out}, {narrow}"]
        (out * own(context, small_numbers(expected, 101))).sum().backward()
        for parameter in model.parameters():
            if parameter.grad.dtype != parameter.dtype:
                found.append(f"a gradient of {parameter.grad.dtype}")
            axes = gradient_sum_axes(parameter, context)
            if axes:
                torch.distributed.all_reduce(parameter.grad, group=context.group(axes).process_group)
        compared = {"output": (out, own(context, expected)), "input": (x.grad, own(context, whole.grad))}
        grads = full_state_dict(model, context, gradients=True)
        compared |= {name: (grads[name], parameter.grad) for name, parameter in twin.named_parameters()}
        return found + [name for name, (mine, want) in compared.items() if not torch.equal(mine, want)]

    for found in MODES[mode].run(body):
        assert found == []


def labelled(outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    return layers.cross_entropy(outputs, batch["labels"])


class Block(nn.Module):
    """A plain linear and a norm of what it returns, under an autocast of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x + self.norm(torch.tanh(self.linear(x)))


def stages() -> nn.Module:
    return nn.Sequential(nn.Embedding(53, HIDDEN), *(Block() for _ in range(4)), nn.Linear(HIDDEN, 53))


def train(rank: int, around: bool, parallel: dict[str, Any], schedule: dict[str, Any]) -> Any:
    """Numbers of three steps and an evaluation, in one block of autocast if ``around``; gradients of the first step."""
    config = config_of(parallel, 3, "fp32", schedule=schedule, lr_schedule=dict(warmup_steps=0))
    config["optimizer"] = dict(type="SGD", lr=0.3)
    own_model = {}
    if not around:
        del config["model"]
        own_model = dict(model=stages, loss_fn=labelled)
    engine = colossus.initialize(config, **own_model)
    numbers = []
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around):
        for step in range(3):
            result = engine.train_step(batch_of(step))
            numbers.append((result.loss, result.grad_norm))
            if step == 0:
                gradients = full_state_dict(engine.model, engine.context, gradients=True)
                assert all(grad.dtype == torch.float32 for grad in gradients.values())
        evaluated = engine.eval_step(batch_of(3)).loss
    engine.close()
    return numbers, evaluated, gradients


PLANS = {
    "1d": (2, dict(tensor=dict(size=2, sequence_sharded=True)), {}),
    "2d": (4, dict(tensor=dict(mode="2d", size=4, weights="step")), {}),
    "3d": (4, dict(tensor=dict(mode="3d", shape=(2, 1, 2))), {}),
    "sequence": (2, dict(sequence=2), {}),
    "1f1b": (2, dict(pipeline=2), dict(type="1f1b", microbatches=4)),
    "zb-h1": (2, dict(pipeline=2), dict(type="zb-h1", microbatches=4)),
    "zb-v and 1d": (4, dict(pipeline=2, tensor=2), dict(type="zb-v", microbatches=4)),
}


@pytest.mark.parametrize("around", [pytest.param(True, marks=pytest.mark.long), False])
def test_plans_train_as_one_process_does_under_autocast(around: bool) -> None:
    """bfloat16 has 8 bits: losses agree to 1e-4, norms to 2e-3, and each gradient to 2^-6 of its norm."""
    references: dict[int, Any] = {}
    for name, (world, parallel, schedule) in PLANS.items():
        if not around and "pipeline" not in parallel:
            continue
        microbatches = schedule.get("microbatches", 1)
        if microbatches not in references:
            alone = dict(microbatches=microbatches)
            (references[microbatches],) = run_ranks(1, train, around, {}, alone, with_context=False)
        numbers, evaluated, gradients = references[microbatches]
        for mine in run_ranks(world, train, around, parallel, schedule, with_context=False):
            for step, want in zip(mine[0], numbers, strict=True):
                assert relative(step[0], want[0]) < 1e-4, (name, mine[0], numbers)
                assert relative(step[1], want[1]) < 2e-3, (name, mine[0], numbers)
            assert relative(mine[1], evaluated) < 1e-4, (name, mine[1], evaluated)
            for key, want in gradients.items():
                if not key.endswith("key.bias"):  # its true gradient is zero
                    assert (mine[2][key] - want).norm() <= want.norm() / 64, (name, key)
