"""An exact strategy of one's own under every plan; plain modules whose parameters ZeRO gathers by block."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.laws import assert_parity
from helpers.long import but
from helpers.ranks import run_ranks
from helpers.strategies import OwnSGD
from helpers.training import Trace, config_of, run_plan
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import colossus
from colossus.layout.split_parameter import local_shape
from colossus.schedule.actions import Action
from colossus.schedule.executor import StepObserver
from colossus.state.model_state_dict import full_state_dict

STEPS, BATCH, CLIP = 5, 12, 0.5
LR, MOMENTUM = 0.05, 0.9
SGD = dict(type="SGD", lr=LR, momentum=MOMENTUM, weight_decay=0.0)
#: ranks, parallel, schedule, microbatches; the head is tied to the embedding, so a pipeline shares it
PLANS: dict[str, tuple[int, dict[str, Any], str, int]] = {
    "data": (2, dict(data=2), "1f1b", 2),
    "1d": (4, dict(data=2, tensor=dict(size=2, sequence_sharded=True)), "1f1b", 1),
    "1f1b": (4, dict(data=2, pipeline=2), "1f1b", 3),
    "zb-h1": (4, dict(data=2, pipeline=2), "zb-h1", 3),
    "zb-v": (4, dict(data=2, pipeline=2), "zb-v", 2),
}


def settings_of(parallel: dict[str, Any], kind: str = "1f1b", microbatches: int = 1, **more: Any) -> dict[str, Any]:
    return config_of(
        parallel,
        STEPS,
        "fp64",
        schedule=dict(type=kind, microbatches=microbatches),
        train=dict(global_batch_size=BATCH, clip_grad_norm=CLIP),
        lr_schedule=dict(type="constant", warmup_steps=0),
        optimizer=SGD,
        **more,
    )


def train_with(strategy: dict[str, Any], plan: tuple[int, dict[str, Any], str, int]) -> list[Trace]:
    world, parallel, kind, microbatches = plan
    return run_plan(world, settings_of({**parallel, "strategy": strategy}, kind, microbatches), STEPS)


@cache
def alone() -> Trace:
    return run_plan(1, settings_of({}), STEPS)[0]


@pytest.mark.parametrize("plan", but(PLANS.keys() - {"zb-h1"}, PLANS))
def test_an_exact_strategy_of_ones_own_is_the_one_process_run(plan: str) -> None:
    assert_parity(train_with(dict(type=OwnSGD, lr=LR, momentum=MOMENTUM), PLANS[plan]), alone(), "fp64")


# -- what a store gathers -------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Plain torch: odd sizes, a shared and a frozen parameter, scalars, unused ones, blocks in a ModuleList."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 5), nn.Linear(5, width, bias=False)
            self.gain = nn.Parameter(torch.tensor(0.7))
            self.fixed = nn.Parameter(torch.randn(3, width), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gain * self.down(torch.tanh(self.up(self.norm(x)))) + self.fixed.sum(0)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList([self.Block(7) for _ in range(3)])
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(7, 11)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for number, block in enumerate(self.blocks):
            # recomputed in backward: inside of a block, around one, and around one by reentrant checkpointing
            x = block(x) if number == 0 else checkpoint(block, x, use_reentrant=number == 2)
        return self.head(x)


def _odd_loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), torch.tensor(labels.numel())


def _odd_run(rank: int, parallel: dict[str, Any], scope: str) -> tuple[Any, ...]:
    settings = dict(
        parallel={**parallel, "tensor": dict(weights=scope)},
        schedule=dict(microbatches=2),
        optimizer=SGD,
        train=dict(steps=STEPS, global_batch_size=8, precision="fp64", clip_grad_norm=CLIP, seed=5),
    )
    engine = colossus.initialize(settings, model=Odd, loss_fn=_odd_loss)
    storages = {param.untyped_storage().data_ptr(): param.untyped_storage() for param in engine.model.parameters()}
    stored_bytes = sum(storage.nbytes() for storage in storages.values())
    numbers: list[tuple[float, float]] = []
    gathered: list[int] = []

    class Watch(StepObserver):
        def after_action(self, action: Action, began: float, ended: float) -> None:
            blocks = engine.model.blocks
            gathered.append(sum(local_shape(block.up.weight)[0] == 5 for block in blocks))

    engine.observers.append(Watch())
    size, index = engine.context.size("data"), engine.context.index("data")
    for step in range(STEPS):
        ids = torch.randint(0, 11, (8, 6), generator=torch.Generator().manual_seed(step))
        part = ids[index * 8 // size : (index + 1) * 8 // size]
        last = {"inputs": part[:, :-1], "labels": part[:, 1:]}
        result = engine.train_step(last)
        numbers.append((result.loss, result.grad_norm))
    evaluated = engine.eval_step(last).loss
    gradients = full_state_dict(engine.model, engine.context, gradients=True)
    state = full_state_dict(engine.model, engine.context)
    engine.close()
    return numbers, evaluated, gradients, state, stored_bytes, gathered


@pytest.mark.rest("3-microbatch", "2-step", "3-matmul")
@pytest.mark.parametrize(
    ("stage", "scope"), [(1, "matmul"), (2, "step"), (3, "matmul"), (3, "microbatch"), (3, "step")]
)
def test_plain_modules_are_gathered_by_block(stage: int, scope: str) -> None:
    (numbers, evaluated, gradients, state, stored_bytes, _) = odd_alone()
    traces = run_ranks(2, _odd_run, dict(data=2, zero=stage), scope, with_context=False)
    for mine, my_evaluation, my_gradients, my_state, my_bytes, gathered in traces:
        assert mine == [pytest.approx(pair, rel=1e-10) for pair in numbers]
        assert my_evaluation == pytest.approx(evaluated, rel=1e-9)
        assert list(my_gradients) == list(gradients)
        assert "unused.weight" not in gradients
        assert list(my_state) == list(state)
        for name, value in gradients.items():
            torch.testing.assert_close(my_gradients[name], value, rtol=1e-9, atol=1e-12, msg=name)
        for name, value in state.items():
            torch.testing.assert_close(my_state[name], value, rtol=1e-9, atol=1e-12, msg=name)
        # blocks that are whole between actions: none, those that autograd waits to run backward of (reentrant
        # checkpointing runs its block without autograd), or all
        if stage == 3:
            assert my_bytes < 0.6 * stored_bytes
            assert set(gathered) == {"matmul": {0}, "microbatch": {0, 2}, "step": {3}}[scope]
        else:
            assert set(gathered) == {3}


@cache
def odd_alone() -> tuple[Any, ...]:
    return run_ranks(1, _odd_run, {}, "matmul", with_context=False)[0]
