"""The writer of checkpoints: every rank writes its part, in parallel; the manifest and the name come last.

Layouts decide which rank writes what. A thread writes while training continues. Ranks report what they have written to
rank 0 in a gloo group of its own, in which the death of a rank is known at once.
"""

from __future__ import annotations

import logging
import math
import platform
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from colossus.checkpoint import folder
from colossus.checkpoint.durable import make_folder, write_flushed
from colossus.checkpoint.errors import CheckpointError, in_words
from colossus.checkpoint.manifest import MANIFEST, About, merge
from colossus.checkpoint.part import Part, written
from colossus.checkpoint.staging import Staging
from colossus.checkpoint.tensor_file import dtype_name, make_header, write_file
from colossus.comm.objects import broadcast_object, gather_object
from colossus.context.parallel_context import ParallelContext

__all__ = ["About", "CheckpointWriter", "Save", "SavedCheckpoint"]

T = TypeVar("T")
#: parts of tensors, of which the rank writes some, and encoded values by path, each of one rank only
RankState = tuple[Sequence[Part], dict[str, Any]]
#: this rank's values and aliases, the parts that it writes, and copies of their tensors
_Snapshot = tuple[dict[str, Any], Sequence[Part], Sequence[Tensor]]

log = logging.getLogger("colossus.checkpoint")

#: longest time from the end of one rank's writing to that of the last, after which the save fails
_TIMEOUT = timedelta(minutes=30)
#: seconds between two signs of life of a rank that waits for others
_SIGN_EVERY = 1.0


@dataclass(frozen=True)
class SavedCheckpoint:
    """The result of a save.

    Attributes:
        path: folder of the checkpoint.
        step: optimizer steps done.
        num_bytes: bytes of all ranks' files.
        stall_seconds: time that this rank's training waited.
        seconds: time from the call to the complete checkpoint.
    """

    path: Path
    step: int
    num_bytes: int
    stall_seconds: float
    seconds: float


class Save:
    """A save under way."""

    def __init__(self, path: Path, step: int, on_progress: Callable[[], None]) -> None:
        self._path, self._step, self._on_progress = path, step, on_progress
        self._began = time.perf_counter()
        self._stall_seconds, self._seconds, self._num_bytes = 0.0, 0.0, 0
        self._error: Exception | None = None
        self._done = threading.Event()
        #: whether the rank's part is written, so that it waits for others and is not stuck
        self._has_written = False
        self._is_reported = False

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> SavedCheckpoint:
        """Wait for the end of the save, and return its result.

        Raises:
            CheckpointError: on all ranks, if it failed on any: which one, and why.
        """
        self.wait_until_done()
        self._is_reported = True
        if self._error is not None:
            raise self._error
        return SavedCheckpoint(self._path, self._step, self._num_bytes, self._stall_seconds, self._seconds)

    def wait_until_done(self, seconds: float = math.inf) -> None:
        """Wait for the end of the save, whether it fails or not, for at most this time."""
        deadline = time.monotonic() + seconds
        while not self._done.wait(min(_SIGN_EVERY, seconds)) and time.monotonic() < deadline:
            if self._has_written:
                self._on_progress()


class CheckpointWriter:
    """A writer of a run's checkpoints into one folder, in which no other run saves. Collective: every rank makes one.

    Args:
        root: the folder of checkpoints, which all ranks see.
        context: this rank's context.
        keep_last, keep_every: see `folder.prune`; 0 and 0 keep all.
        on_block: called from any thread after each block, and while the rank waits for others: a sign of life.
        label: name of the group in which ranks report how their writing ended.
    """

    def __init__(
        self,
        root: Path,
        context: ParallelContext,
        *,
        keep_last: int = 0,
        keep_every: int = 0,
        on_block: Callable[[], None] = lambda: None,
        label: str = "checkpoint",
    ) -> None:
        self.root, self._context, self._on_block = folder.absolute(root), context, on_block
        self._keep = keep_last, keep_every
        self._group = context.background_group(label, _TIMEOUT)
        #: part of the names of folders that this run has not completed
        self._token = broadcast_object(uuid.uuid4().hex[:8], self._group, 0)
        self._number = 0
        self._staging = Staging()
        self._last: Save | None = None

    def save(self, collect: Callable[[], RankState], about: About, *, background: bool = True) -> Save:
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
        save._stall_seconds = time.perf_counter() - save._began
        threading.Thread(target=self._run, args=(save, target, about, snapshot), name="colossus-checkpoint").start()
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

    def _end(self, target: Path, about: About, mine: dict[str, Any] | str) -> int | str:
        """Complete the checkpoint, or remove its files. Return its bytes, or what went wrong, on all ranks."""
        parts = gather_object(mine, self._group)
        ended = None if parts is None else self._complete(target, about, parts)
        ended = broadcast_object(ended, self._group, 0)
        assert ended is not None
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

    def _prepare(self, target: Path) -> None:
        """Make the folder to write into."""
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


def problem_among(outcomes: Sequence[Any]) -> str | None:
    """Return what went wrong on the first rank that failed, and how many others failed; None if none did."""
    problems = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if not problems:
        return None
    return problems[0] + (f"; and {len(problems) - 1} more ranks failed" if problems[1:] else "")


def aliases_in(parts: Iterable[Part]) -> dict[str, str]:
    """Return the other names of a model's tied parameters and buffers -> the first name of each."""
    named = ((next(iter(part.names)), part.names) for part in parts if len(part.names) > 1)
    return {alias: first for first, names in named for alias in names if alias != first}


def write_parts(
    path: Path, parts: Sequence[Part], tensors: Iterable[Tensor], on_block: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Write and flush a file of these parts; ``tensors`` yields their values one after the other.

    Returns:
        The file's part of the manifest.
    """
    times = Counter(part.key for part in parts)
    names = [part.key if times[part.key] == 1 else f"{part.key}[{part.box[0][0]}:{part.box[0][1]}]" for part in parts]
    header = make_header([(name, part.dtype, part.size) for name, part in zip(names, parts, strict=True)])
    crc = write_file(path, header, tensors, on_block)
    rows = [
        [part.key, dtype_name(part.dtype), part.shape, header.offsets[name], [low for low, _ in part.box], part.size]
        for name, part in zip(names, parts, strict=True)
    ]
    return {"file": [path.name, header.num_bytes, crc], "tensors": rows}
