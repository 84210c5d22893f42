"""Every schedule trains as one process does: gradients, tied weights, norm, weights; any number of microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from helpers import laws
from helpers.long import long
from helpers.ranks import run_ranks
from helpers.training import Trace, batch_of, config_of, relative, run_plan

import colossus
from colossus.schedule.actions import Action, Actions

#: the second step has what the first has left: weights, sums under way, state of links
STEPS, BATCH, LAYERS = 2, 12, 6
MODEL = dict(num_layers=LAYERS)
KINDS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
#: ranks, microbatches: one, fewer than ranks, no multiple of them, many
COUNTS = [(2, 1), (2, 3), (4, 1), (4, 3), (4, 6)]


def config(parallel: dict[str, Any], kind: str = "1f1b", microbatches: int = 1, **more: Any) -> dict[str, Any]:
    settings: dict[str, Any] = dict(
        schedule=dict(type=kind, microbatches=microbatches), model=MODEL, train=dict(global_batch_size=BATCH)
    )
    for key, value in more.items():
        settings[key] = {**settings.get(key, {}), **value}
    return config_of(parallel, STEPS, "fp64", **settings)


@cache
def reference(**model: Any) -> Trace:
    return run_plan(1, config({}, model=model), STEPS)[0]


def assert_parity(world: int, settings: dict[str, Any], **model: Any) -> None:
    traces = run_plan(world, settings, STEPS)
    laws.assert_parity(traces, reference(**model), "fp64")


def schedules() -> Iterator[Any]:
    """Every schedule with every count; by default what tests/test_parity.py has not."""
    for kind in KINDS:
        for count in COUNTS:
            is_default = (kind, *count) == ("gpipe", 2, 3)
            yield pytest.param(kind, *count, marks=() if is_default else pytest.mark.long)


@pytest.mark.parametrize(("kind", "ranks", "microbatches"), list(schedules()))
def test_every_schedule_is_the_one_process_run(kind: str, ranks: int, microbatches: int) -> None:
    assert_parity(ranks, config(dict(pipeline=ranks), kind, microbatches))


@pytest.mark.parametrize("kind", ["zb-h1", *long("1f1b", "interleaved")])
def test_without_shared_memory(kind: str) -> None:
    """Through c10d, where receives are posted ahead of the actions that need them."""
    assert_parity(4, config(dict(pipeline=4), kind, 6, comm=dict(shared_memory=False)))


# -- what ranks hold ------------------------------------------------------------------------------------------


def _saved_microbatches(rank: int, settings: dict[str, Any]) -> int:
    """The most microbatches of which anything is kept for backward, by the saved tensors themselves."""
    engine = colossus.initialize(settings)
    alive: dict[int, int] = {}
    most = 0

    class Saved:
        def __init__(self, tensor: torch.Tensor) -> None:
            nonlocal most
            self.tensor, self.microbatch = tensor, engine.context.rng.microbatch
            alive[self.microbatch] = alive.get(self.microbatch, 0) + 1
            most = max(most, sum(count > 0 for count in alive.values()))

        def __del__(self) -> None:
            alive[self.microbatch] -= 1

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        engine.train_step(batch_of(0, settings["model"], BATCH))
    assert not any(alive.values())
    engine.close()
    return most


def test_saved_tensors_in_flight_of_1f1b() -> None:
    settings = config(dict(pipeline=4), "1f1b", 6)
    assert run_ranks(4, _saved_microbatches, settings, with_context=False) == [4, 3, 2, 1]


# -- evaluation, state ----------------------------------------------------------------------------------------


def _evaluate(rank: int, settings: dict[str, Any], sizes: list[int]) -> list[tuple[float, int]]:
    engine = colossus.initialize(settings)
    out = []
    for step, size in enumerate(sizes):
        engine.train_step(batch_of(step, settings["model"], BATCH))
        result = engine.eval_step(batch_of(50 + step, settings["model"], size))
        out.append((result.loss, result.tokens))
    assert engine.model.training
    engine.close()
    return out


@pytest.mark.parametrize("kind", [pytest.param("1f1b", marks=pytest.mark.long), "zb-v"])
def test_evaluation_between_steps_on_batches_of_any_size(kind: str) -> None:
    sizes = [BATCH, 5, 1, 9]
    wanted = _run_one(_evaluate, config({}), sizes)
    for got in run_ranks(4, _evaluate, config(dict(pipeline=4), kind, 6), sizes, with_context=False):
        for (loss, tokens), (other, count) in zip(got, wanted, strict=True):
            assert relative(loss, other) < 1e-10
            assert tokens == count


def _run_one(body: Any, *args: Any) -> Any:
    return run_ranks(1, body, *args, with_context=False)[0]


# -- a user's own schedule --------------------------------------------------------------------------------------


def test_a_users_own_schedule_runs() -> None:
    """One that runs its backwards in another order than its forwards."""

    def backwards_last_first(stages: int, microbatches: int) -> Actions:
        out: Actions = []
        for stage in range(stages):
            forwards = [Action("forward", stage, index) for index in range(microbatches)]
            backwards = [Action("backward", stage, index) for index in reversed(range(microbatches))]
            out.append([*forwards, *backwards])
        return out

    settings = config(dict(pipeline=4), "1f1b", 3)
    settings["schedule"]["type"] = backwards_last_first
    assert_parity(4, settings)
