"""Metrics, display and TensorBoard of a run that saves checkpoints and goes on from one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.launched.fake_engine import FakeEngine

from colossus.engine.fit import fit
from colossus.monitor.hooks.tensorboard import TensorBoard
from colossus.monitor.metrics import Metrics


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def resumed(step: int, **train: Any) -> FakeEngine:
    """An engine that goes on behind a step."""
    engine = FakeEngine(**train)
    engine.completed_steps = step
    engine.checkpoints.resumed_from = Path("runs/first/checkpoints/step-00000003")
    engine.checkpoints.resumed_plan = "data 2 x tensor 2"
    return engine


def test_rows_behind_the_checkpoint_come_again_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fit(FakeEngine(steps=6, validation=False), [Metrics(path)])
    before = path.read_bytes().splitlines(keepends=True)
    with path.open("ab") as file:
        file.write(b'[]\n{"step": 7, "lo')
    fit(resumed(3, steps=8, validation=False), [Metrics(path)])
    after = path.read_bytes().splitlines(keepends=True)
    assert after[:3] == before[:3]
    assert [row["step"] for row in rows_of(path)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_the_rows_of_a_checkpoint_are_on_the_disk_before_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[list[int]] = []
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append([row["step"] for row in rows_of(path)]))
    # at a stop the row of the last step waits for an evaluation that does not come
    engine = FakeEngine(steps=4, eval_every=2, stop_at=2)
    metrics = Metrics(path)
    engine.checkpoints.on_save_after = {1, 2}
    fit(engine, [metrics])
    assert flushed == [[1], [1, 2]]


@pytest.mark.parametrize("step", [0, 3])
def test_tensorboard_hides_the_steps_that_come_again(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            calls.append(purge_step)

        def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None: ...

        def flush(self) -> None:
            calls.append("flush")

        def close(self) -> None: ...

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    engine = resumed(step, steps=4, validation=False) if step else FakeEngine(steps=4, validation=False)
    engine.run.folder = tmp_path
    engine.checkpoints.on_save_after = {4}
    fit(engine, [Metrics(tmp_path / "metrics.jsonl"), TensorBoard()])
    assert calls == [4 if step else None, "flush"]
