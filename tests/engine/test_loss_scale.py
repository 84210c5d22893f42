"""fp16: the loss is scaled as `torch.amp.GradScaler` does it, under every plan."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import run_ranks
from helpers.training import config_of, train
from torch import Tensor, nn

import colossus
from colossus.context.parallel_context import current_context
from colossus.context.precision import Precision
from colossus.engine.nonfinite import LossScaler

WIDTH, CLIP, LR = 12, 0.05, 0.02
FP16 = torch.autocast("cpu", torch.float16)
#: steps with an overflow
OVERFLOWS = (3, 4, 9)
STEPS = 14


class Net(nn.Module):
    """Computes in float16 whoever calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with FP16:
            return self.layers(x)


def loss_of(out: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    with FP16:
        return F.mse_loss(out, batch[1], reduction="sum"), len(batch[1])


def pairs(step: int, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(samples, WIDTH, generator=generator), torch.randn(samples, WIDTH, generator=generator)


def with_overflows(model: nn.Module, steps: Sequence[int]) -> dict[str, int]:
    """A gradient overflows when what is put into ``step`` is one of these."""
    at = {"step": -1}
    weight = model.layers[0].weight
    weight.register_hook(lambda grad: torch.full_like(grad, torch.inf) if at["step"] in steps else None)
    return at


def plain_loop(model: nn.Module, samples: int, init: float, overflows: Sequence[int]) -> tuple[list[float], list[bool]]:
    """Scales after each step, and which steps were skipped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=init, growth_interval=3)
    at = with_overflows(model, overflows)
    scales, skips = [], []
    for step in range(STEPS):
        at["step"] = step
        optimizer.zero_grad()
        batch = pairs(step, samples)
        total, count = loss_of(model(batch[0]), batch)
        scaler.scale(total / count).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        before = model.layers[0].weight.detach().clone()
        scaler.step(optimizer)
        skips.append(torch.equal(before, model.layers[0].weight))
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, skips


def engine_of(samples: int, init: float = 1024.0, **more: Any) -> Any:
    config: dict[str, Any] = dict(
        optimizer=dict(type="SGD", lr=LR, momentum=0.9),
        lr_schedule=dict(type="constant", warmup_steps=0),
        train=dict(
            steps=STEPS,
            global_batch_size=samples,
            precision="fp16",
            clip_grad_norm=CLIP,
            max_skips=1,
            loss_scale=dict(init=init, growth_interval=3),
            **more,
        ),
        device="cpu",
    )
    return colossus.initialize(config, model=Net, loss_fn=loss_of)


@pytest.mark.parametrize(
    ("samples", "init", "overflows"), [(8, 1024.0, OVERFLOWS), (6, 1024.0, OVERFLOWS), (8, 2.0**24, ())]
)
def test_scale_skips_and_weights_are_those_of_torch_amp(samples: int, init: float, overflows: Sequence[int]) -> None:
    """On samples that are a power of two the factors are the same, and so are all bits."""
    engine = engine_of(samples, init)
    model = copy.deepcopy(engine.model)
    at = with_overflows(engine.model, overflows)
    scales, results = [], []
    for step in range(STEPS):
        at["step"] = step
        results.append(engine.train_step(pairs(step, samples)))
        scales.append(engine.loss_scaler.scale.item())
    wanted, skips = plain_loop(model, samples, init, overflows)
    assert scales == wanted
    assert len(set(scales)) >= 3  # it grew and fell
    assert [result.loss_scale for result in results] == [init, *scales[:-1]]
    assert [result.skipped for result in results] == skips
    assert 3 <= sum(skips) == results[-1].num_skipped < STEPS - 3
    assert not overflows or skips == [step in overflows for step in range(STEPS)]
    assert any(result.grad_norm > CLIP for result in results if not result.skipped)
    for param, other in zip(engine.model.parameters(), model.parameters(), strict=True):
        if samples == 8:
            assert torch.equal(param, other)
        torch.testing.assert_close(param, other, rtol=1e-3, atol=1e-4)


def test_a_scaler_goes_on_from_its_state() -> None:
    engine = engine_of(8)
    at = with_overflows(engine.model, OVERFLOWS)
    for step in range(5):
        at["step"] = step
        engine.train_step(pairs(step, 8))
    state = engine.loss_scaler.state_dict()
    assert state == {"scale": 512.0, "growth_tracker": 0, "num_tokens": 8}
    other = LossScaler(None, current_context(), 8)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert other.begin_step(torch.zeros(8, 3)).item() == 64.0
    for _ in range(2000):
        other.update(None, torch.tensor(77.0))  # it has counted before
    assert other.state_dict() == {"scale": 1024.0, "growth_tracker": 0, "num_tokens": 8}


class OfWords(nn.Module):
    """One answer for many words."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(16, 8), nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids).mean(1))


def test_from_the_second_step_on_the_factor_follows_what_the_loss_counted() -> None:
    """The shapes of the batch are a first guess: here of 512 words for each of the 8 losses."""
    train = dict(global_batch_size=8, precision="fp16", loss_scale=dict(init=4096.0))
    config = dict(train=train, optimizer=dict(type="SGD", lr=0.1), device="cpu")
    engine = colossus.initialize(
        config, model=OfWords, loss_fn=lambda out, batch: (F.cross_entropy(out, batch[1], reduction="sum"), len(out))
    )
    ids = torch.randint(0, 16, (8, 512), generator=torch.Generator().manual_seed(0))
    factors, norms = [], []
    engine.model.out.bias.register_hook(lambda grad: norms.append(grad.norm().item()))
    for _ in range(3):
        engine.train_step((ids, torch.tensor([0, 1, 0, 0, 0, 0, 0, 0])))
        factors.append(engine.loss_scaler.factor.item())
    assert factors == [4096.0 / (8 * 512), 4096.0 / 8, 4096.0 / 8]
    assert norms[1] > 100 * norms[0]  # what backward began with
    assert engine.loss_scaler.state_dict()["num_tokens"] == 8


# -- several ranks --------------------------------------------------------------------------------------------


def _scaled(rank: int, config: dict[str, Any], is_scaled: bool) -> Any:
    """In float64, with a scaled loss: a power of two changes no bit."""
    Precision.scales_loss = property(lambda self: is_scaled)  # type: ignore[method-assign, assignment]
    return train(rank, config, 3)


@pytest.mark.rest("1f1b", "1d")
@pytest.mark.parametrize(
    ("world", "parallel", "kind"),
    [
        (1, {}, "1f1b"),
        (2, dict(pipeline=2), "1f1b"),
        (2, dict(pipeline=2), "zb-h1"),
        (2, dict(data=1, tensor=dict(size=2)), "1f1b"),
    ],
    ids=["one process", "1f1b", "zb-h1", "1d"],
)
def test_a_scaled_loss_changes_nothing_else(world: int, parallel: dict[str, Any], kind: str) -> None:
    microbatches = 2 if world > 1 and "pipeline" in parallel else 1
    config = config_of(parallel, 3, "fp64", schedule=dict(type=kind, microbatches=microbatches))
    plain, scaled = (run_ranks(world, _scaled, config, on, with_context=False)[0] for on in (False, True))
    assert (scaled.losses, scaled.norms) == (plain.losses, plain.norms)
    assert all(torch.equal(scaled.end[name], value) for name, value in plain.end.items())


# -- the number that sums are larger by ---------------------------------------------------------------------------


def _agreed(context: Any) -> float:
    scaler = LossScaler(None, context, 4)
    return scaler.begin_step(torch.zeros(2, 5 + 7 * context.index("tensor"), dtype=torch.int64)).item()


def test_all_ranks_divide_by_the_same_number() -> None:
    """Of batches that were padded to other lengths."""
    assert run_ranks(2, _agreed) == [65536.0 / 32] * 2
