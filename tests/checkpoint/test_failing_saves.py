"""Saves that fail: a full disk, errors of any call, one rank alone. The old checkpoint stays, the next save works."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpointing import latest_step, one_process, save, state_of, step_in
from helpers.disk import CALLS, watched
from helpers.ranks import run_ranks

from colossus.checkpoint import checkpoint_store as store
from colossus.checkpoint import part
from colossus.checkpoint import save as save_module
from colossus.checkpoint.checkpoint_store import Collect, DiskStore
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.manifest import About
from colossus.checkpoint.part import Part
from colossus.context.parallel_context import ParallelContext


def failing_at(number: int, code: int, names: tuple[str, ...] = CALLS) -> Any:
    """The call of this number fails with an error of the file system."""
    count = itertools.count(1)

    def before(name: str, *args: Any, **more: Any) -> None:
        if next(count) == number:
            raise OSError(code, os.strerror(code), *([os.fspath(args[0])] if isinstance(args[0], (str, Path)) else []))

    return watched(before, names)


def contents(root: Path) -> list[str]:
    return sorted(os.listdir(root))


@pytest.mark.rest("5")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_any_call_may_fail(in_memory: Path, code: int) -> None:
    """One call after the other fails, in a save that replaces a checkpoint of its step and removes an old one."""
    num_failed = 0
    for number in itertools.count(1):
        root = in_memory / str(number)
        saves = DiskStore(root, one_process(), keep_last=2)
        for step in (1, 2, 3):
            save(saves, step)
        has_failed, problem = False, ""
        with failing_at(number, code):
            try:
                save(saves, 3)
            except CheckpointError as error:
                has_failed, problem = True, str(error)
        if has_failed:
            num_failed += 1
            assert f"{root / 'step-00000003'} was not saved: rank 0 on " in problem
            assert os.strerror(code) in problem
            assert problem.count(str(root)) > 1, f"no path: {problem}"
        assert latest_step(root) == 3, f"call {number}"
        assert all(step_in(root / name) for name in contents(root) if name.startswith("step-") and "." not in name)
        save(saves, 4)
        names = contents(root)
        assert names == ["latest", "step-00000003", "step-00000004"], f"call {number}: {names}"
        saves.finish()
        shutil.rmtree(root)
        if number > 60:
            break
    assert num_failed > 10


# -- one rank has trouble of its own ----------------------------------------------------------------------


def _trouble(context: ParallelContext, root: Path) -> list[str]:
    saves, messages = DiskStore(root, context), []
    rank, world = context.rank, context.world_size

    def attempt(step: int, collect: Collect, background: bool) -> None:
        try:
            saves.put(collect, About(step), background=background).wait()
        except CheckpointError as error:
            messages.append(str(error).partition(": rank ")[2])

    def raise_error() -> Any:
        raise KeyError("no state today")

    for troubled, background in ((0, True), (1, False)):
        attempt(1, raise_error if rank == troubled else lambda: state_of(1, rank, world), background)
    copy = store.Staging.copy
    if rank == 1:
        store.Staging.copy = _no_memory  # type: ignore[method-assign]
    attempt(2, lambda: state_of(2, rank, world), True)
    store.Staging.copy = copy  # type: ignore[method-assign]

    # parts that do not fit together
    attempt(3, lambda: state_of(3, 0, world), True)
    other = [Part.whole("model/matrix", torch.zeros(rank + 1, dtype=torch.float64))], {}
    attempt(4, lambda: other, False)

    attempt(5, lambda: state_of(5, rank, world), True)
    return messages


def _no_memory(*args: Any) -> Any:
    raise MemoryError("512 GiB")


def test_what_fails_on_one_rank_fails_on_all(in_memory: Path) -> None:
    here, there = run_ranks(2, _trouble, in_memory / "checkpoints")
    assert here == there
    assert len(here) == 5
    for message, (rank, words) in zip(
        here,
        [
            (0, "KeyError: 'no state today'"),
            (1, "KeyError: 'no state today'"),
            (1, "MemoryError: 512 GiB"),
            (0, "is not covered once by its 2 chunks"),
            (0, "model/matrix is float64 (1,) on one rank and float64 (2,) on another"),
        ],
        strict=True,
    ):
        assert message.startswith(f"{rank} on "), message
        assert words in message
    assert latest_step(in_memory / "checkpoints", 2) == 5
    assert contents(in_memory / "checkpoints") == ["latest", "step-00000005"]


def _left_alone(context: ParallelContext, root: Path) -> None:
    """What was told goes to a file: one of two ranks is not there to give an answer."""
    saves = DiskStore(root, context)
    save(saves, 1, rank=context.rank, world=2)
    began = time.monotonic()
    if context.rank == 1:

        def leave() -> Any:
            os._exit(0)

        saves.put(leave, About(2))
    with pytest.raises(CheckpointError) as failed:
        saves.put(lambda: state_of(2, 0, 2), About(2)).wait()
    assert time.monotonic() - began < 10.0
    (root.parent / "told").write_text(str(failed.value).partition("was not saved: ")[2])


def test_a_rank_that_has_died_is_not_waited_for(in_memory: Path) -> None:
    root = in_memory / "checkpoints"
    with pytest.raises(AssertionError) as failed:
        run_ranks(2, _left_alone, root, timeout_seconds=1.0)
    assert "rank 1 ---\ndied without a word" in str(failed.value)
    assert (in_memory / "told").read_text().startswith("a rank has ended, or cannot be reached any more")
    assert latest_step(root, 2) == 1
    assert contents(root) == ["latest", "step-00000001"]


def _waits_for_the_other(context: ParallelContext, root: Path) -> int:
    signs: list[int] = []
    saves = DiskStore(root, context, on_block=lambda: signs.append(1))
    under_way = saves.put(lambda: state_of(1, context.rank, 2), About(1))
    while not under_way._has_written:
        time.sleep(0.01)
    before = len(signs)
    under_way.wait()
    return len(signs) - before


def test_a_rank_that_waits_for_another_is_not_stuck(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so as long as it waits: a run that was told to stop is ended when it is silent for too long."""
    write_file = part.write_file

    def slow(path: Path, *args: Any) -> int:
        time.sleep(1.0 if "rank-00001" in path.name else 0.0)
        return write_file(path, *args)

    monkeypatch.setattr(part, "write_file", slow)
    monkeypatch.setattr(save_module, "_SIGN_EVERY", 0.1)
    waited, _ = run_ranks(2, _waits_for_the_other, in_memory / "checkpoints")
    assert waited >= 5
