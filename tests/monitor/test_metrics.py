"""Metrics rows, the plain and the live display."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.launched.fake_engine import FakeEngine
from helpers.ranks import run_ranks
from helpers.training import batch_of, config_of

import colossus
from colossus.comm import accounting
from colossus.engine.fit import fit
from colossus.monitor.display import Display
from colossus.monitor.metrics import Metrics
from colossus.monitor.row_file import RowFile

KEYS = ["step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds", "memory_bytes", "time"]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_row_per_step_with_all_digits(tmp_path: Path) -> None:
    fit(FakeEngine(steps=5, eval_every=2), [Metrics(tmp_path / "run" / "metrics.jsonl")])
    rows = rows_of(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [list(row) for row in rows] == [
        KEYS if step in (1, 3) else [*KEYS, "validation_loss"] for step in (1, 2, 3, 4, 5)
    ]
    assert [row["loss"] for row in rows] == [10.0 - step + 1 / 3 for step in (1, 2, 3, 4, 5)]
    assert [row.get("validation_loss") for row in rows] == [None, 18.0, None, 16.0, 15.0]
    for row in rows:
        assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(7)
        assert row["memory_bytes"] > 1e7


@pytest.mark.parametrize("trouble", [{"stop_at": 2}, {"fail_in_evaluation": True}])
def test_the_row_of_an_evaluation_that_never_ends_is_not_lost(tmp_path: Path, trouble: dict[str, Any]) -> None:
    path = tmp_path / "metrics.jsonl"
    engine = FakeEngine(steps=5, eval_every=2, stop_at=trouble.get("stop_at", 0))
    if "fail_in_evaluation" in trouble:
        engine.evaluate = lambda: 1 / 0  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):
            fit(engine, [Metrics(path)])
    else:
        fit(engine, [Metrics(path)])
    assert [row["step"] for row in rows_of(path)] == [1, 2]


def test_an_evaluation_that_comes_late_completes_the_row_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, real = tmp_path / "metrics.jsonl", os.pwrite
    file = RowFile(path)
    for step in (1, 2):
        file.append({"step": step, "loss": 1.5})
    before = path.read_bytes()
    assert not file.complete(1, {"validation_loss": 0.5})  # of a run that began from another's checkpoint, say

    monkeypatch.setattr("colossus.monitor.row_file.os.pwrite", lambda to, data, at: real(to, data[:40], at))
    assert not file.complete(2, {"validation_loss": 0.5})
    assert path.read_bytes() == before
    assert capfd.readouterr().err.startswith(f"colossus: rows are missing in {path}")
    monkeypatch.undo()

    for _ in range(2):  # again: a run that died before its next checkpoint
        assert file.complete(2, {"validation_loss": 0.5})
    file.append({"step": 3})
    rows = rows_of(path)
    assert rows == [{"step": 1, "loss": 1.5}, {"step": 2, "loss": 1.5, "validation_loss": 0.5}, {"step": 3}]


def test_a_disk_that_is_full_for_a_while_leaves_whole_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As the kernel does it: the write takes what there is room for, the next one raises."""
    path, real, calls = tmp_path / "metrics.jsonl", os.write, itertools.count(1)

    def write(file: int, data: bytes) -> int:
        number = next(calls)
        if number == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[:40] if number == 2 else data)

    monkeypatch.setattr("colossus.monitor.row_file.os.write", write)
    fit(FakeEngine(steps=4), [Metrics(path)])
    monkeypatch.undo()
    assert [row["step"] for row in rows_of(path)] == [1, 4]
    warning = f"colossus: rows are missing in {path} (is the disk full?); training continues\n"
    assert capfd.readouterr().err == warning


@pytest.mark.parametrize("removed", ["file", "folder"])
def test_a_file_that_somebody_has_removed_is_made_again(
    removed: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    file = RowFile(path)
    for step in (1, 2, 3, 4):
        file.append({"step": step})
        if step == 2:
            path.unlink() if removed == "file" else shutil.rmtree(path.parent)
    assert [row["step"] for row in rows_of(path)] == [3, 4]
    assert capfd.readouterr().err == f"colossus: {path} was removed: a new one has the rows from here on\n"


def test_plain_lines(tmp_path: Path) -> None:
    stream = io.StringIO()
    fit(FakeEngine(steps=7, eval_every=5, log_every=3), [Display(tmp_path, stream)])
    lines = stream.getvalue().splitlines()
    assert lines[0] == "run: data 1, 1 process on cpu, 8 parameters"
    assert [line.split("  ")[0] for line in lines[1:-1]] == [
        *("step 1/7", "step 3/7", "step 5/7", "step 6/7", "step 7/7", "step 7/7")
    ]
    assert lines[1].split("  ")[1:4] == ["loss 9.3333", "grad_norm 0.1", "lr 0.001"]
    assert "MFU N/A" in lines[1]
    assert lines[3] == "step 5/7  validation loss 15.0000"
    assert lines[-1].startswith("done: 7 steps in ")
    assert lines[-1].endswith(f"loss 3.3333, validation loss 13.0000; run folder {tmp_path}")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("fail_at", [0, 3])
def test_the_live_display_shows_the_figures_and_leaves_the_cursor_visible(
    tmp_path: Path, fail_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    display = Display(tmp_path, stream)
    engine = FakeEngine(steps=4, eval_every=2, fail_at=fail_at)
    if fail_at:
        with pytest.raises(ArithmeticError):
            fit(engine, [display])
    else:
        fit(engine, [display])
    text = stream.getvalue()
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert hidden in text
    assert text.rindex(shown) > text.rindex(hidden)
    assert ("validation 18.0000" if fail_at else "validation 16.0000") in text
    assert ("2/4" if fail_at else "4/4") in text
    assert ("done: 4 steps" in text) == (not fail_at)


# -- comm.accounting ------------------------------------------------------------------------------------------


def run_counted(rank: int, path: Path, counted: bool) -> list[dict[str, Any]]:
    """Body of a rank: three steps with an evaluation after the second; what each train step sends, by axis."""
    plan = dict(data=2, tensor=2)
    config = config_of(plan, 3, "fp32", comm=dict(accounting=counted), train=dict(eval_every=2))
    engine = colossus.initialize(config)
    shard = engine.context.index("data")
    batches: list[Any] = [
        {key: value[4 * shard : 4 * shard + 4] for key, value in batch_of(step).items()} for step in range(3)
    ]
    engine.loaders = SimpleNamespace(train=batches, validation=batches[:1], description="made here")  # type: ignore[assignment]
    sent: list[accounting.Counter] = []
    step = engine.train_step

    def counted_step(batch: Any) -> Any:
        assert len(accounting.listeners) == (counted and rank == 0)
        with accounting.count() as moved:
            result = step(batch)
        sent.append(moved)
        return result

    engine.train_step = counted_step  # type: ignore[method-assign]
    fit(engine, [Metrics(path)])
    assert not accounting.listeners
    engine.close()
    return [
        {axis: {"calls": moved.calls(axis), "bytes": moved.bytes(axis)} for _, axis, _ in moved.entries}
        for moved in sent
    ]


@pytest.mark.rest("False")
@pytest.mark.parametrize("counted", [True, False])
def test_rows_have_what_a_step_sends_along_each_axis(tmp_path: Path, counted: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    sent = run_ranks(4, run_counted, path, counted, with_context=False)[0]
    assert len(sent) == 3
    for moved in sent:
        assert moved.keys() == {"data", "tensor", "dataxtensor"}
        assert all(axis["bytes"] > 0 for axis in moved.values())
    rows = rows_of(path)
    assert ["validation_loss" in row for row in rows] == [False, True, True]
    assert [row.get("comm") for row in rows] == (sent if counted else [None] * 3)
