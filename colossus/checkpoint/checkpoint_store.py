"""Stores of checkpoints: every rank puts its part, in parallel; the manifest and the name come last.

A thread writes while training continues. Ranks report what they have written to rank 0 in a gloo group of its own, in
which the death of a rank is known at once.
"""

from __future__ import annotations

import logging
import platform
import shutil
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from colossus.checkpoint import folder
from colossus.checkpoint.durable import make_folder, write_flushed
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint, in_words
from colossus.checkpoint.manifest import MANIFEST, About, merge
from colossus.checkpoint.part import Part, aliases_in, write_parts, written
from colossus.checkpoint.rank_errors import on_all_ranks
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.save import Save
from colossus.checkpoint.staging import Staging
from colossus.checkpoint.weight_sources import open_weights
from colossus.comm.objects import broadcast_object, gather_object
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext

T = TypeVar("T")
#: returns this rank's state: parts of tensors, of which it writes some, and encoded values by path, each of one rank
Collect = Callable[[], tuple[Sequence[Part], dict[str, Any]]]
#: this rank's values and aliases, the parts that it writes, and copies of their tensors
_Snapshot = tuple[dict[str, Any], Sequence[Part], Sequence[Tensor]]
#: returns a checkpoint that is not among the damaged ones
Find = Callable[[dict[Path, CheckpointError]], Path | None]

log = logging.getLogger("colossus.checkpoint")

#: longest time from the end of one rank's writing to that of the last, after which the save fails
_TIMEOUT = timedelta(minutes=30)


class Store(ABC):
    """A place of a run's checkpoints, in which no other run saves. Collective: every rank makes one.

    Args:
        root: folder of the checkpoints.
        context: this rank's context.
        on_block: called from any thread after each block, and while the rank waits for others: a sign of life.
        label: name of the group in which ranks report how their writing ended.
    """

    def __init__(self, root: Path, context: ParallelContext, on_block: Callable[[], None], label: str) -> None:
        self.root, self._context, self._on_block = folder.absolute(root), context, on_block
        self._group = context.background_group(label, _TIMEOUT)
        #: part of the names of folders that this run has not completed
        self._token = broadcast_object(uuid.uuid4().hex[:8], self._group, 0)
        self._number = 0
        self._staging = Staging()
        self._last: Save | None = None

    def put(self, collect: Collect, about: About, *, background: bool = True) -> Save:
        """Start to save the state of all ranks; waits for the end of the save before. Collective.

        Args:
            collect: returns this rank's state. If it raises, the save fails on all ranks.
            about: facts about the run for the manifest.
            background: whether to return once the tensors are copied; else when the save has ended, well or not. The
                process does not end before the save has.
        """
        self.finish()
        save = self._last = Save(self.root / folder.name_of(about.step), about.step, self._on_block)
        self._number += 1
        target = folder.temporary(self.root, about.step, f"{self._token}-{self._number}")
        snapshot: _Snapshot | Exception
        try:
            parts, values = collect()
            mine = written(parts)
            tensors = [part.local for part in mine]
            rest = {"values": values, "aliases": aliases_in(parts)}
            snapshot = rest, mine, self._staging.copy(tensors) if background else tensors
        except Exception as error:
            snapshot = error
        thread = threading.Thread(target=self._run, args=(save, target, about, snapshot), name="colossus-checkpoint")
        try:
            thread.start()
            save._stall_seconds = time.perf_counter() - save._began
        finally:
            save._may_write.set()
        if not background:
            save.wait_until_done()
            save._stall_seconds = time.perf_counter() - save._began
        return save

    def finish(self) -> None:
        """Wait for the end of the save under way. If it failed and nobody has waited for it, rank 0 logs the error."""
        if self._last is not None:
            self._last.wait_until_done()
            self._log_failure(self._last)
            self._last = None

    def _log_failure(self, save: Save) -> None:
        if save._error is not None and not save._is_reported and self._context.is_logging_rank:
            log.error("%s", save._error)

    def _run(self, save: Save, target: Path, about: About, snapshot: _Snapshot | Exception) -> None:
        save._may_write.wait()
        try:
            save._num_bytes = self._write(save, target, about, snapshot)
        except Exception as error:
            save._error = CheckpointError(f"{save._path} was not saved: {in_words(error)}")
            save._error.__cause__ = error
        save._seconds = time.perf_counter() - save._began
        save._done.set()
        if not threading.main_thread().is_alive():  # nobody will wait for the save
            self._log_failure(save)

    def _write(self, save: Save, target: Path, about: About, snapshot: _Snapshot | Exception) -> int:
        """Write this rank's part; rank 0 completes the checkpoint. Return the bytes of all ranks."""
        mine = self._outcome(lambda: self._write_part(target, snapshot))
        save._has_written = True
        try:
            ended = self._end(target, about, mine)
        except RuntimeError as error:  # the process group has failed
            if self._context.rank == 0:  # the only rank that knows whether the checkpoint has its name
                shutil.rmtree(target, ignore_errors=True)
            raise CheckpointError("a rank has ended, or cannot be reached any more") from error
        if isinstance(ended, str):
            raise CheckpointError(ended)
        return ended

    def _outcome(self, work: Callable[[], T]) -> T | str:
        """Return the result of some work, or what went wrong on which rank."""
        try:
            return work()
        except Exception as error:
            return f"rank {self._context.rank} on {platform.node()}: {in_words(error)}"

    def _write_part(self, target: Path, snapshot: _Snapshot | Exception) -> dict[str, Any]:
        """Write this rank's file, if it writes anything; return its part of the manifest."""
        if isinstance(snapshot, Exception):
            raise snapshot
        rest, parts, tensors = snapshot
        self._prepare(target)
        path = target / folder.file_of(self._context.rank)
        in_file = write_parts(path, parts, tensors, self._on_block) if parts else {"file": None, "tensors": []}
        return rest | in_file

    @abstractmethod
    def _prepare(self, target: Path) -> None:
        """Make the folder to write into, and room for it."""

    @abstractmethod
    def _end(self, target: Path, about: About, mine: dict[str, Any] | str) -> int | str:
        """Complete the checkpoint, or remove its files. Return its bytes, or what went wrong, on all ranks."""


def problem_among(outcomes: Sequence[Any]) -> str | None:
    """Return what went wrong on the first rank that failed, and how many others failed; None if none did."""
    problems = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if not problems:
        return None
    return problems[0] + (f"; and {len(problems) - 1} more ranks failed" if problems[1:] else "")


class DiskStore(Store):
    """Checkpoints in a folder that all ranks see.

    Args:
        root, context, on_block: see `Store`.
        keep_last, keep_every: see `folder.prune`; 0 and 0 keep all.
    """

    def __init__(
        self,
        root: Path,
        context: ParallelContext,
        *,
        keep_last: int = 0,
        keep_every: int = 0,
        on_block: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(root, context, on_block, "checkpoint")
        self._keep = keep_last, keep_every

    @staticmethod
    def get(
        world: AxisGroup, find: Find, take: Callable[[CheckpointReader], object], average: str | None = None
    ) -> Path | None:
        """Read the checkpoint that rank 0 finds; if it is damaged, the next that it finds. Collective.

        Args:
            world: the ranks that read.
            find: returns the folder of a checkpoint, or of weights in another format.
            take: reads it. A `DamagedCheckpoint` must be raised on all ranks, before anything is changed.
            average: name of an average to read in place of the parameters.

        Returns:
            The folder that was read; None if none was found.
        """
        damaged: dict[Path, CheckpointError] = {}
        while True:
            mine = on_all_ranks(world, lambda: find(damaged) if world.index == 0 else None, names_ranks=False)
            path = broadcast_object(mine, world, 0)
            if path is None:
                return None
            try:
                with on_all_ranks(world, partial(open_weights, path, average)) as reader:
                    take(reader)
            except DamagedCheckpoint as error:
                damaged[path] = error
                if world.index == 0:
                    log.warning("%s", error)
            else:
                return path

    def _prepare(self, target: Path) -> None:
        make_folder(self.root)
        target.mkdir(exist_ok=True)
        if self._context.rank == 0:
            folder.remove_left_over(self.root, target)  # the save needs their room

    def _complete(self, target: Path, about: About, outcomes: Sequence[dict[str, Any] | str]) -> int | str:
        """Complete the checkpoint on rank 0, or remove its files. Return its bytes, or what went wrong."""
        ended: int | str | None = problem_among(outcomes)
        if ended is None:
            parts = [part for part in outcomes if not isinstance(part, str)]
            ended = self._outcome(lambda: self._put_in_place(target, about, parts))
        if isinstance(ended, str):
            shutil.rmtree(target, ignore_errors=True)
        return ended

    def _put_in_place(self, target: Path, about: About, parts: Sequence[dict[str, Any]]) -> int:
        """Write the manifest, give the checkpoint its name, remove old ones. Return its bytes."""
        manifest = merge(parts, about)
        for name, data in about.files.items():
            write_flushed(target / name, data)
        for name in manifest.files:
            if not (target / name).exists():
                raise CheckpointError(
                    f"{target / name} was written, but rank 0 on {platform.node()} does not see it: checkpoint.dir "
                    f"must be a folder that all nodes share"
                )
        write_flushed(target / MANIFEST, manifest.to_bytes())
        folder.require_files(target)
        folder.put_in_place(target, self.root, about.step)
        try:
            folder.prune(self.root, *self._keep)
        except (OSError, CheckpointError) as error:  # the new one is complete
            log.warning("%s: old checkpoints cannot be removed: %s", self.root, in_words(error))
        return manifest.num_bytes

    def _end(self, target: Path, about: About, mine: dict[str, Any] | str) -> int | str:
        parts = gather_object(mine, self._group)
        ended = None if parts is None else self._complete(target, about, parts)
        ended = broadcast_object(ended, self._group, 0)
        assert ended is not None
        return ended
