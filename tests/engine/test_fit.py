"""The loop around the step: the order of hooks, evaluations, stops and errors."""

from __future__ import annotations

import itertools
import signal

import pytest
import torch
from helpers.launched.fake_engine import Diary, FakeEngine
from helpers.training import config_of

import colossus
from colossus.engine.fit import FitSummary, Hook, evaluation_due, fit
from colossus.engine.results import addend, signal_of
from colossus.launch.ends import STOP_SIGNALS


def test_hooks_are_called_in_order() -> None:
    diary = Diary()
    summary = fit(FakeEngine(steps=3, eval_every=2), [diary])
    assert diary.lines == [
        *("start", "begin 1", "end 1", "begin 2", "end 2", "eval 2", "begin 3", "end 3", "eval 3", "done")
    ]
    assert summary == FitSummary(3, "finished", loss=7 + 1 / 3, validation_loss=17.0)


@pytest.mark.parametrize(
    ("eval_every", "validation", "due"),
    [(0, True, []), (2, False, []), (2, True, [2, 4, 5]), (5, True, [5]), (9, True, [5])],
)
def test_when_an_evaluation_is_due(eval_every: int, validation: bool, due: list[int]) -> None:
    engine = FakeEngine(steps=5, eval_every=eval_every, validation=validation)
    assert [step for step in range(1, 6) if evaluation_due(engine, step)] == due


def test_a_stop_ends_the_loop_after_its_step_without_the_evaluation() -> None:
    diary = Diary()
    summary = fit(FakeEngine(steps=9, eval_every=1, stop_at=2), [diary])
    assert (summary.steps, summary.reason) == (2, "stopped")
    assert diary.lines == ["start", "begin 1", "end 1", "eval 1", "begin 2", "end 2", "done"]


def test_a_stop_during_an_evaluation_ends_the_loop_and_reports_no_half_of_it() -> None:
    diary = Diary()
    summary = fit(FakeEngine(steps=9, eval_every=1, stop_in_evaluation=2), [diary])
    assert (summary.steps, summary.reason, summary.validation_loss) == (2, "stopped", 19.0)
    assert diary.lines == ["start", "begin 1", "end 1", "eval 1", "begin 2", "end 2", "done"]


@pytest.mark.parametrize("when", ["stop_at", "stop_in_evaluation"])
@pytest.mark.parametrize("step", [2, 3])
def test_a_run_that_goes_on_begins_with_the_evaluation_that_a_stop_has_left_out(when: str, step: int) -> None:
    """Also behind the last step: until then the run is not finished."""
    diary = Diary()
    engine = FakeEngine(steps=3, eval_every=1, **{when: step})
    assert fit(engine, [diary]).reason == "stopped"
    diary.lines.clear()
    summary = fit(engine, [diary])
    rest = ["begin 3", "end 3", "eval 3"] if step == 2 else []
    assert diary.lines == ["start", f"eval {step}", *rest, "done"]
    assert (summary.steps, summary.reason, summary.validation_loss) == (3, "finished", 17.0)


def test_an_error_goes_to_every_hook_and_on() -> None:
    class Broken(Hook):
        def on_exception(self, engine: object, error: BaseException) -> None:
            raise KeyError("broken too")

    diary = Diary()
    with pytest.raises(ArithmeticError, match="the fake engine fails") as caught:
        fit(FakeEngine(steps=5, fail_at=2), [Broken(), diary])
    assert diary.lines == ["start", "begin 1", "end 1", "begin 2", "ArithmeticError"]
    assert any("Broken.on_exception raised KeyError" in note for note in caught.value.__notes__)


def test_data_that_ends_early_is_explained() -> None:
    engine = FakeEngine(steps=5)
    engine.loader = itertools.repeat("batch", 2)
    with pytest.raises(ValueError, match=r"the data ended after 2 of 5 steps.*train\.steps=2"):
        fit(engine)


def _falling(progress: float, min_ratio: float, power: int) -> float:
    return max(min_ratio, (1.0 - progress) ** power)


def test_a_function_of_ones_own_is_a_learning_rate_schedule() -> None:
    schedule = dict(type=_falling, warmup_steps=2, min_ratio=0.1, power=2)
    engine = colossus.initialize(config_of(dict(data=1), 6, "fp32", lr_schedule=schedule, optimizer=dict(lr=1.0)))
    try:
        assert [engine.lr_at(step) for step in (0, 1, 2, 4, 6)] == [0.5, 1.0, 1.0, 0.25, 0.1]
    finally:
        engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4097])
@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_the_signal_of_one_rank_is_known_to_all(signum: signal.Signals, ranks: int, dtype: torch.dtype) -> None:
    one = torch.tensor([addend(signum), *[0.0] * (ranks - 1)], dtype=dtype)
    every = torch.full((ranks,), addend(signum), dtype=dtype)
    mixed = torch.tensor([addend(signum), *[addend(None)] * (ranks - 1)], dtype=dtype)
    for requests in (one, every, mixed):
        assert signal_of(requests.sum().item()) == signum
