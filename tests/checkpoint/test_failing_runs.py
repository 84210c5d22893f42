"""What becomes of a run whose saves fail: it goes on, or all ranks stop, with the reason; nobody waits for ever."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.disk import watched
from helpers.ranks import run_ranks
from helpers.small_run import Counter, Lines, make_engine

from colossus.checkpoint import folder, part
from colossus.checkpoint.errors import CheckpointError
from colossus.engine.engine import Engine
from colossus.engine.fit import Hook, fit


class _Full(Hook):
    """The disk of a rank is full while the checkpoints of these steps are written."""

    def __init__(self, rank: int, *steps: int) -> None:
        self.folders, self.saved = [f"step-{step:08d}.tmp-" for step in steps if rank == 1], []  # type: ignore[var-annotated]

    def on_checkpoint(self, engine: Engine, saved: Any) -> None:
        self.saved.append(saved.step)

    def before(self, name: str, path: Any, *args: Any, **more: Any) -> None:
        if any(folder in str(path) for folder in self.folders):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _of_saves(lines: Lines) -> list[str]:
    """The log without the warning that the model's batch norm is of a rank's samples."""
    return [line for line in lines.lines if "buffers" not in line]


def _fit(rank: int, root: Path, full: tuple[int, ...], options: dict[str, Any]) -> list[Any]:
    lines, hook = Lines(), _Full(rank, *full)
    engine = make_engine(root, every=1, keep_last=2, **options)
    message = ""
    with watched(hook.before, ("open",)):
        try:
            fit(engine, [hook, Counter()])
        except CheckpointError as error:
            message = str(error)
    steps = engine.completed_steps
    engine.close()
    return [steps, hook.saved, message, _of_saves(lines)]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.rest("False")
def test_a_run_goes_on_when_a_save_fails(in_memory: Path, background: bool) -> None:
    """Each failed save is told once, on rank 0; the old checkpoint stays; the next save works; nothing is left. That
    the last save of a run fails is an error: nothing is left to go on with."""
    root = in_memory / "checkpoints"
    here, there = run_ranks(2, _fit, root, (3, 4), dict(background=background), with_context=False)
    assert here[:3] == there[:3]
    steps, saved, message, lines = here
    assert (steps, message) == (6, "")
    assert there[3] == []
    assert saved == [1, 2, 5, 6]
    assert len(lines) == 2
    for step, line in zip((3, 4), lines, strict=True):
        assert line.startswith(f"ERROR {root / f'step-0000000{step}'} was not saved: rank 1 on ")
        assert line.endswith("rank-00001.safetensors: No space left on device")
        assert f"step-0000000{step}.tmp-" in line
    assert sorted(os.listdir(root)) == ["latest", "step-00000005", "step-00000006"]
    here, there = run_ranks(2, _fit, in_memory / "last", (5, 6), dict(background=background), with_context=False)
    assert here[2] == there[2]
    assert "step-00000006 was not saved: rank 1 on " in here[2]


def _slow(seconds: float) -> None:
    write_file = part.write_file

    def write(*args: Any) -> int:
        time.sleep(seconds)
        return write_file(*args)

    part.write_file = write


class _Fails(Hook):
    def on_step_end(self, engine: Engine, result: Any) -> None:
        if result.step == 3:
            raise ArithmeticError("the model has diverged")


def _ends_early(rank: int, root: Path, how: str) -> list[Any]:
    _slow(0.3)
    lines = Lines()
    engine = make_engine(root, every=2)
    if how == "fails":
        with pytest.raises(ArithmeticError):
            fit(engine, [_Fails()])
    else:
        batches = iter(engine.loader)
        for _ in range(3):
            engine.train_step(next(batches))
            engine.checkpoints.after_step()
        engine.close()
        engine.close()
    return _of_saves(lines)


@pytest.mark.parametrize("how", ["closes", "fails"])
def test_a_save_under_way_is_not_lost(in_memory: Path, how: str) -> None:
    root = in_memory / "checkpoints"
    assert run_ranks(2, _ends_early, root, how, with_context=False) == [[], []]
    latest = folder.find_latest(root)
    assert latest is not None
    assert latest.name == "step-00000002"
