"""What a user's loop may get wrong in a step or an evaluation: an error in words on every rank, and no rank waits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from helpers.ranks import RankError, run_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset

import colossus
from colossus.engine.engine import Engine
from colossus.engine.fit import fit

WIDTH, SAMPLES = 4, 8


class Samples(Dataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((WIDTH,), float(index), dtype=torch.float64)


class Counted:
    """Ready batches of this data rank; ``read`` counts them."""

    def __init__(self, count: int, size: int = SAMPLES, broken_at: int | None = None) -> None:
        self.count, self.size, self.read, self.broken_at = count, size, 0, broken_at

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.count):
            self.read += 1
            if number == self.broken_at:
                raise OSError(f"batch {number} is broken")
            yield torch.full((self.size, WIDTH), float(number), dtype=torch.float64)


def squares(y: Tensor, batch: Any) -> tuple[Tensor, Any]:
    return y.square().sum(), y.shape[0]


def engine_of(
    parallel: dict[str, Any], loss: Any = squares, data: Any = None, timeout: float = 10.0, **train: Any
) -> Engine:
    settings: dict[str, Any] = dict(
        parallel=parallel,
        optimizer=dict(type="SGD", lr=0.01),
        train=dict(global_batch_size=SAMPLES, precision="fp64", seed=1, **train),
        comm=dict(timeout_seconds=timeout),
        device="cpu",
    )
    return colossus.initialize(settings, model=lambda: nn.Linear(WIDTH, WIDTH), loss_fn=loss, data=data)


# -- validation ----------------------------------------------------------------------------------------------------


def _uneven(rank: int, counts: tuple[int, int], limit: int | None) -> tuple[float, int]:
    data = {
        "type": lambda: Samples(64),
        "validation": {"type": lambda: Counted(counts[rank], SAMPLES // 2), "per_rank": True},
    }
    engine = engine_of(dict(data=2), data=data, **({} if limit is None else {"eval_batches": limit}))
    summary = engine.evaluate()
    engine.close()
    return summary.loss, summary.tokens


@pytest.mark.parametrize(("counts", "limit"), [((3, 2), None), ((2, 5), 4)])
def test_data_ranks_with_unequal_numbers_of_validation_batches(counts: tuple[int, int], limit: int | None) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, _uneven, counts, limit, with_context=False, timeout=30)
    words = "the validation data ended on 1 of 2 ranks after fewer batches than on the others"
    assert str(caught.value).count(words) == 2


def _broken_on_one(rank: int, place: str) -> str:
    """One data rank cannot read a batch, and its user may go on; what is told on each."""
    broken = lambda: Counted(6, SAMPLES // 2, broken_at=2 if rank else None)  # noqa: E731
    whole = lambda: Counted(6, SAMPLES // 2)  # noqa: E731
    train, validation = (broken, whole) if place == "training" else (whole, broken)
    data = {"type": train, "per_rank": True, "validation": {"type": validation, "per_rank": True}}
    engine = engine_of(dict(data=2), data=data, timeout=2.0, steps=4)

    def run() -> None:
        if place == "training":
            fit(engine)
        try:
            engine.evaluate()
        except OSError:
            if place != "validation, caught":
                raise
            engine.train_step(next(engine.loader))

    with pytest.raises((RuntimeError, OSError)) as caught:
        run()
    if rank and place != "validation, caught":
        engine.close()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("training", "OSError: batch 2 is broken"),
        ("validation, caught", "RuntimeError: an earlier step or evaluation failed on this rank"),
    ],
)
def test_a_batch_that_one_data_rank_cannot_read(place: str, words: str) -> None:
    other, told = run_ranks(2, _broken_on_one, place, with_context=False, timeout=30)
    assert told.startswith(words)
    assert re.match(r"PeerGone: (Connection closed by peer: rank 1|timeout: rank 1 did not come to)", other), other


def test_a_data_rank_whose_loop_is_shorter() -> None:
    """The others are told within the time that the config gives, also where the processes met before."""

    def body(rank: int) -> None:
        engine = engine_of(dict(data=2), timeout=1.0)
        for _ in range(2):
            engine.train_step(torch.ones(SAMPLES // 2, WIDTH))
        if rank:
            engine.context.store().wait(["told"], timedelta(seconds=60))  # it lives, and does something else
            return
        with pytest.raises(RuntimeError, match="timeout: rank 1 did not come to collective #"):
            engine.train_step(torch.ones(SAMPLES // 2, WIDTH))
        engine.context.store().set("told", "")

    run_ranks(2, body, with_context=False, timeout=30)


# -- steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("parallel", [{}, dict(pipeline=2)], ids=["alone", "pipeline"])
def test_a_step_without_gradients(mode: Any, parallel: dict[str, Any]) -> None:
    def body(rank: int) -> float:
        settings = dict(parallel=parallel, train=dict(global_batch_size=SAMPLES, precision="fp64"), device="cpu")
        model = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))  # noqa: E731
        engine = colossus.initialize(settings, model=model, loss_fn=squares)
        with mode(), pytest.raises(ValueError, match=r"train_step was called under torch\.\w+, which turns"):
            engine.train_step(torch.ones(SAMPLES, WIDTH))
        loss = engine.train_step(torch.ones(SAMPLES, WIDTH)).loss  # nothing is broken
        engine.close()
        return loss

    world = 2 if parallel else 1
    assert all(math.isfinite(loss) for loss in run_ranks(world, body, with_context=False))


# -- stops ---------------------------------------------------------------------------------------------------------
