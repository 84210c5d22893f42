"""Models that write to their input in place: as in plain torch, and under a pipeline refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import RankError, run_ranks
from torch import Tensor, nn

import colossus

WIDTH, SAMPLES = 6, 12


class Written(nn.Sequential):
    """Its first block writes."""

    def __init__(self) -> None:
        super().__init__(First(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class First(nn.Module):
    def forward(self, inputs: Any) -> Tensor:
        x: Tensor = inputs["x"]
        x -= 0.25
        x[:, 0] = 0.5
        return x


def to_target(y: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (y - batch["target"]).square().sum(), y.shape[0]


def to_input(y: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (y - batch["inputs"]["x"]).square().sum(), y.shape[0]


def batch_of() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    x, target = (torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return {"inputs": {"x": x}, "target": target}


def _settings(parallel: dict[str, Any], schedule: dict[str, Any]) -> dict[str, Any]:
    return dict(
        parallel=parallel,
        schedule=schedule,
        optimizer=dict(type="SGD", lr=0.05),
        train=dict(global_batch_size=SAMPLES, precision="fp64", seed=1),
        comm=dict(timeout_seconds=10.0),
        device="cpu",
    )


def _train(rank: int, parallel: dict[str, Any], schedule: dict[str, Any], loss: Any, model: Any) -> list[float]:
    engine = colossus.initialize(_settings(parallel, schedule), model=model, loss_fn=loss)
    batch = batch_of()
    count, index = engine.context.size("data"), engine.context.index("data")
    own = {"inputs": {"x": batch["inputs"]["x"].chunk(count)[index]}, "target": batch["target"].chunk(count)[index]}
    numbers = [engine.eval_step(own).loss]
    for _ in range(3):  # the same tensors again, as a loop over a small set of them does
        result = engine.train_step(own)
        numbers += [result.loss, result.grad_norm]
    engine.close()
    return numbers


def _plain(rank: int, loss: Any) -> list[float]:
    """The same in plain torch, where the caller's batch is written to."""
    model = colossus.initialize(_settings({}, {}), model=Written, loss_fn=loss).model
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.05), batch_of()

    def mean() -> Tensor:
        total, count = loss(model(batch["inputs"]), batch)
        return total / count  # type: ignore[no-any-return]

    with torch.no_grad():
        numbers = [mean().item()]
    for _ in range(3):
        optimizer.zero_grad()
        value = mean()
        value.backward()
        squares = sum(param.grad.square().sum() for param in model.parameters() if param.grad is not None)
        numbers += [value.item(), torch.as_tensor(squares).sqrt().item()]
        optimizer.step()
    return numbers


PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "microbatches": (1, {}, dict(microbatches=3)),
    "data": (2, dict(data=2), {}),
}


@pytest.mark.parametrize("loss", [to_target, to_input])
@pytest.mark.parametrize("name", PLANS)
def test_without_a_pipeline_it_is_as_in_plain_torch(name: str, loss: Any) -> None:
    """The batch is written to, and the loss reads what was written."""
    world, parallel, schedule = PLANS[name]
    (plain,) = run_ranks(1, _plain, loss, with_context=False)
    for numbers in run_ranks(world, _train, parallel, schedule, loss, Written, with_context=False):
        assert numbers == pytest.approx(plain, rel=1e-10)


def _refused(rank: int, schedule: str, mode: Any) -> None:
    """By a step, and by an evaluation before any step."""
    settings = _settings(dict(pipeline=2), dict(type=schedule, microbatches=3))
    engine = colossus.initialize(settings, model=Written, loss_fn=to_target)
    if mode is None:
        engine.train_step(batch_of())
    else:
        with mode():
            engine.eval_step(batch_of())


@pytest.mark.parametrize(("schedule", "mode"), [("1f1b", None), ("1f1b", torch.no_grad), ("zb-v", None)])
def test_under_a_pipeline_it_is_refused(schedule: str, mode: Any) -> None:
    words = r"the model writes to its input in place \(inputs\['x'\], \[\d+, 6\]\): under a pipeline"
    with pytest.raises(RankError, match=words):
        run_ranks(2, _refused, schedule, mode, with_context=False, timeout=30)
