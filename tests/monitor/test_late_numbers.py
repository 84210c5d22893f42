"""Hooks that show every step wait for no accelerator: the numbers of a step are read when the next one is over."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.fake_cuda import Waits, run_fake_ranks
from helpers.launched.fake_engine import FakeEngine

from colossus.engine.fit import Hook, fit
from colossus.engine.results import Routing, StepResult
from colossus.layers.router import SUMS
from colossus.monitor.display import Display
from colossus.monitor.metrics import Metrics


class LateResult(SimpleNamespace):
    """As on an accelerator; reading while its own step is the last one notes a wait."""

    def __init__(self, engine: LateEngine, fields: dict[str, Any]) -> None:
        super().__init__(**fields)
        self.engine, self.is_sent = engine, False

    def send_to_host(self) -> bool:
        self.is_sent = True
        return True

    @property
    def has_arrived(self) -> bool:
        return self.is_sent and (self.step < self.engine.completed_steps or self.engine.has_come)

    def wait(self) -> None:
        _ = self.loss

    @property
    def loss(self) -> float:
        assert self.is_sent
        if self.step == self.engine.completed_steps:
            self.engine.waited_after.append(self.step)
        return 10.0 - self.step + 1 / 3


class LateEngine(FakeEngine):
    """Its numbers come with the next step; with ``has_come`` those of the last one are there, too."""

    has_come = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.waited_after: list[int] = []

    def train_step(self, batch: object) -> Any:
        fields = vars(super().train_step(batch))
        return LateResult(
            self, {key: x for key, x in fields.items() if key not in ("loss", "send_to_host", "has_arrived", "wait")}
        )


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_of(path: Path) -> list[int]:
    return [row["step"] for row in rows_of(path)]


def test_rows_come_one_step_late_in_their_order(tmp_path: Path) -> None:
    path, now = tmp_path / "late.jsonl", tmp_path / "now.jsonl"
    seen = []

    class Reader(Hook):
        def on_step_end(self, engine: Any, result: Any) -> None:
            seen.append(steps_of(path))

    engine = LateEngine(steps=5, eval_every=3)
    fit(engine, [Metrics(path), Reader()])
    assert seen == [[], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    assert set(engine.waited_after) == {3, 5}  # an evaluation follows, which waits anyway; and the end
    fit(FakeEngine(steps=5, eval_every=3), [Metrics(now)])
    measured = ("time", "step_seconds", "tokens_per_second", "memory_bytes")
    late, at_once = (
        [{key: x for key, x in row.items() if key not in measured} for row in rows_of(one)] for one in (path, now)
    )
    assert late == at_once
    assert [list(row) for row in rows_of(path)] == [list(row) for row in rows_of(now)]


@pytest.mark.parametrize("trouble", [dict(fail_at=4), dict(stop_at=3), dict(fail_at=4, eval_every=3)])
def test_nothing_is_lost_on_a_failure_and_a_stop(tmp_path: Path, trouble: dict[str, int]) -> None:
    path = tmp_path / "metrics.jsonl"
    engine = LateEngine(steps=9, **trouble)
    if "fail_at" in trouble:
        engine.has_come = True
        with pytest.raises(ArithmeticError):
            fit(engine, [Metrics(path)])
    else:
        fit(engine, [Metrics(path)])
    assert steps_of(path) == [1, 2, 3]
    assert "validation_loss" in rows_of(path)[2] or "eval_every" not in trouble


def test_a_device_that_hangs_is_not_waited_for_when_the_run_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("colossus.monitor.metrics.PATIENCE", 0.2)
    path, engine = tmp_path / "metrics.jsonl", LateEngine(steps=9, fail_at=4)
    began = time.monotonic()
    with pytest.raises(ArithmeticError):
        fit(engine, [Metrics(path)])
    assert 0.2 < time.monotonic() - began < 5
    assert steps_of(path) == [1, 2]


def test_what_is_there_is_written_before_a_hard_end(tmp_path: Path) -> None:
    path, engine = tmp_path / "metrics.jsonl", LateEngine(steps=3)
    metrics = Metrics(path)
    seen = []

    class Ends(Hook):
        def on_step_end(self, engine: Any, result: Any) -> None:
            if result.step == 2:
                metrics.flush()
                seen.append(steps_of(path))
                engine.has_come = True
                metrics.flush()
                seen.append(steps_of(path))

    fit(engine, [metrics, Ends()])
    assert seen == [[1], [1, 2]]
    assert steps_of(path) == [1, 2, 3]


def test_plain_lines_are_of_their_own_step_and_wait_at_these_alone(tmp_path: Path) -> None:
    stream, engine = io.StringIO(), LateEngine(steps=7, log_every=3, validation=False)
    fit(engine, [Display(tmp_path, stream)])
    lines = [line.split("  ") for line in stream.getvalue().splitlines()[1:-1]]
    assert [line[:2] for line in lines] == [
        *(["step 1/7", "loss 9.3333"], ["step 3/7", "loss 7.3333"], ["step 6/7", "loss 4.3333"]),
        ["step 7/7", "loss 3.3333"],
    ]
    assert set(engine.waited_after) == {1, 3, 6, 7}


# -- several threads ----------------------------------------------------------------------------------------


# -- on a device ----------------------------------------------------------------------------------------------


def reads(rank: int) -> tuple[list[str], list[str], list[Any]]:
    """A result that is read while its step runs waits once, however much is read; one step later for nothing."""

    def result() -> StepResult:
        numbers, flag = torch.zeros(4, dtype=torch.float64, device="cuda"), torch.zeros((), device="cuda")
        singles: Any = dict(skipped=flag.bool(), num_skipped=flag.int(), loss_scale=flag, own_tokens=numbers[1])
        counted = torch.zeros(3 + len(SUMS), dtype=torch.float64, device="cuda")
        return StepResult(1, 0.1, numbers, routing=Routing({"router": 3}, counted), **singles)

    Waits.begin_step()
    now, later = result(), result()
    with Waits(allowed=True) as at_once:
        values = [now.loss, now.tokens, now.grad_norm, now.skipped, now.num_skipped, now.loss_scale, now.replica_tokens]
        values.append(now.experts["router"]["tokens"])
    assert later.send_to_host()
    Waits.begin_step()
    with Waits(allowed=True) as late:
        _ = (
            later.loss,
            later.grad_norm,
            later.skipped,
            later.num_skipped,
            later.loss_scale,
            later.replica_tokens,
            later.experts,
        )
    return at_once.found, late.found, values


def test_a_result_is_read_by_one_copy() -> None:
    ((at_once, late, values),) = run_fake_ranks(1, reads)
    assert len(at_once) == 1
    assert late == []
    assert values[1:] == [0, 0.0, False, 0, 0.0, 0, [0, 0, 0]]
