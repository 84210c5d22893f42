"""SIGKILL at any moment, to ranks and to the launcher: a checkpoint is there, no older than the last completed one."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from helpers.ranks import grid
from helpers.small_run import Counter, make_engine
from torch import distributed as dist

from colossus.checkpoint import folder
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.save import SavedCheckpoint
from colossus.context.parallel_context import ParallelContext
from colossus.engine.engine import Engine
from colossus.engine.fit import Hook, fit

WORLD = 2


class Run:
    """Ranks that were forked; what they note is read by `noted`."""

    def __init__(self, folder: Path, number: int, body: Callable[[ParallelContext, Callable[[int], None]], None]):
        self._notes = folder / f"notes-{number}"
        self._notes.touch()
        self.pids = [self._fork(rank, folder / f"store-{number}", body) for rank in range(WORLD)]

    def _fork(self, rank: int, store: Path, body: Callable[[ParallelContext, Callable[[int], None]], None]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            notes = os.open(self._notes, os.O_WRONLY | os.O_APPEND)
            dist.init_process_group(
                "gloo",
                rank=rank,
                world_size=WORLD,
                store=dist.FileStore(str(store), WORLD),
                timeout=timedelta(seconds=60),
            )
            body(ParallelContext(grid(tensor=WORLD), rank), lambda step: os.write(notes, b"%d\n" % step) and None)
        finally:
            os._exit(1)

    def noted(self) -> list[int]:
        return [int(line) for line in self._notes.read_text().split("\n")[:-1]]

    def wait_for_notes(self, number: int) -> None:
        until = time.monotonic() + 60
        while len(self.noted()) < number:
            assert time.monotonic() < until
            time.sleep(0.005)

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)

    def end(self) -> None:
        for rank, pid in enumerate(self.pids):
            with contextlib.suppress(ProcessLookupError):
                self.kill(rank)
            os.waitpid(pid, 0)


@contextlib.contextmanager
def started(folder: Path, number: int, body: Callable[[ParallelContext, Callable[[int], None]], None]) -> Iterator[Run]:
    run = Run(folder, number, body)
    try:
        yield run
    finally:
        run.end()


# -- a whole engine ---------------------------------------------------------------------------------------


class _Notes(Hook):
    def __init__(self, note: Callable[[int], None]) -> None:
        self.note = note

    def on_train_start(self, engine: Engine) -> None:
        if engine.context.rank == 0:
            self.note(engine.completed_steps)

    def on_checkpoint(self, engine: Engine, saved: SavedCheckpoint) -> None:
        if engine.context.rank == 0:
            self.note(saved.step)


def _trains(root: Path, *, background: bool) -> Callable[[ParallelContext, Callable[[int], None]], None]:
    def body(context: ParallelContext, note: Callable[[int], None]) -> None:
        os.environ.update(RANK=str(context.rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(context.rank))
        context.close()
        engine = make_engine(root, every=1, keep_last=2, resume="auto", background=background, steps=10**6)
        fit(engine, [_Notes(note), Counter()])

    return body


@pytest.mark.long
def test_runs_are_killed_and_resumed(in_memory: Path) -> None:
    drawn = random.Random(15)
    root, step = in_memory / "checkpoints", 0
    for number in range(6):
        with started(in_memory, number, _trains(root, background=number % 2 == 0)) as run:
            run.wait_for_notes(drawn.randint(2, 9))
            assert run.noted()[0] == step, "it does not go on where the last one was"
            time.sleep(drawn.uniform(0.0, 0.02))
            run.kill(number % WORLD)
            time.sleep(drawn.choice([0.0, 0.003, 0.03]))
        latest = folder.find_latest(root)
        assert latest is not None
        with CheckpointReader(latest) as reader:
            reader.verify()
        step = reader.manifest.step
        assert step >= max(run.noted()), f"kill {number}"
    assert step >= 12
