"""A process that dies before any of its system calls, a machine that loses power after any: a checkpoint is there."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.checkpointing import latest_step, one_process, save, step_in
from helpers.disk import DIED, DIED_WRITING, RecordedDisk, dying_before
from helpers.long import long

from colossus.checkpoint.checkpoint_store import DiskStore

#: steps of the saves of a run: one is saved twice, and the third checkpoint makes the first one go
STEPS = (1, 2, 2, 3)
KEEP_LAST = 2


def run(root: Path, steps: tuple[int, ...], done: Callable[[int], None], *, background: bool = False) -> None:
    saves = DiskStore(root, one_process(), keep_last=KEEP_LAST)
    for step in steps:
        save(saves, step, background=background)
        done(step)


def killed_before(number: int, root: Path, *, half_written: bool) -> tuple[int, int]:
    """The exit code of a run in a process of its own that was to die before its call of this number; the last step it
    completed."""
    reading, writing = os.pipe()
    write = os.write
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with dying_before(number, half_written=half_written):
                run(root, STEPS, lambda step: write(writing, bytes([step])) and None, background=number % 2 == 0)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    completed = b""
    while more := os.read(reading, 100):
        completed += more
    os.close(reading)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, completed[-1] if completed else 0


@pytest.mark.parametrize("apart", [7, *long(1)])
def test_a_process_may_die_before_any_call(in_memory: Path, apart: int) -> None:
    """And the run that comes after it goes on, and leaves nothing of it."""
    number, code = 1 - apart, DIED
    while code != 0:
        number += apart
        for half_written in (False, True):
            root = in_memory / f"{number}-{half_written}" / "checkpoints"
            code, completed = killed_before(number, root, half_written=half_written)
            assert code in (0, DIED, DIED_WRITING)
            assert latest_step(root) >= completed, f"killed before call {number}"
            run(root, (4,), lambda step: None)
            names = sorted(os.listdir(root))
            assert latest_step(root) == 4
            assert names[0] == "latest"
            assert all(step_in(root / name) for name in names[1:])
            assert len(names) - 1 <= KEEP_LAST, names
            shutil.rmtree(root.parent)
            if code != DIED_WRITING:
                break
    assert number > 60, "the calls are no longer seen"


class PowerLosses:
    """Records a run, and looks after each of its calls at what a power loss would leave."""

    def __init__(self, base: Path, seed: int) -> None:
        self.base = base
        base.mkdir()
        self.disk = RecordedDisk(base)
        self.drawn = random.Random(seed)
        self.completed = self.num_states = 0
        self.lost: list[str] = []

    def look(self) -> None:
        for keep in (0.0, 1.0, 0.5, 0.5):
            into = self.base.with_name("after")
            self.disk.after_power_loss(into, self.drawn, keep)
            self.num_states += 1
            try:
                step = latest_step(into / "checkpoints")
                for path in (into / "checkpoints").glob("step-????????"):
                    step_in(path)  # whatever has a name is whole
            except ValueError as error:
                step = -1
                self.lost.append(str(error))
            if step < self.completed:
                self.lost.append(f"after call {self.disk.num_calls}: step {step}, completed was {self.completed}")
            shutil.rmtree(into)

    def run(self) -> None:
        def done(step: int) -> None:
            self.completed = step

        with self.disk.recording(self.look):
            run(self.base / "checkpoints", STEPS, done)


def test_power_may_be_lost_after_any_call(in_memory: Path) -> None:
    losses = PowerLosses(in_memory / "disk", seed=5)
    losses.run()
    assert not losses.lost
    assert losses.num_states > 250
