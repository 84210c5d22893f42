"""Writing checkpoints: every rank its part, in parallel; the manifest and the name last.

Which rank writes what follows from layouts. A thread writes while training goes on; what ranks have written they tell
rank 0 in a gloo group apart from those of training, in which the death of a rank is known at once.
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
from colossus.checkpoint.staging import Staging
from colossus.checkpoint.tensor_box import RankState, TensorBox
from colossus.checkpoint.tensor_file import dtype_name, make_header, write_file
from colossus.comm.objects import broadcast_object, gather_object
from colossus.context.parallel_context import ParallelContext

__all__ = ["About", "CheckpointWriter", "Save", "SavedCheckpoint"]

T = TypeVar("T")
#: what this rank adds to a checkpoint, what of it it writes, and where the numbers of these are
_Snapshot = tuple[RankState, Sequence[TensorBox], Sequence[Tensor]]

log = logging.getLogger("colossus.checkpoint")

#: from the end of one rank's writing to that of the last: after it the save fails
_TIMEOUT = timedelta(minutes=30)
#: seconds between two signs that a rank which waits for others is not stuck
_SIGN_EVERY = 1.0


@dataclass(frozen=True)
class SavedCheckpoint:
    """How a save ended.

    Attributes:
        path: of the checkpoint.
        step: optimizer steps done.
        num_bytes: of all ranks' files.
        stall_seconds: that this rank's training waited.
        seconds: from the call to the complete checkpoint.
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
        #: its part is written: from then on it waits for the others, and is not stuck
        self._has_written = False
        self._is_told = False

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> SavedCheckpoint:
        """Wait for its end.

        Raises:
            CheckpointError: on all ranks, when it failed on any: which one, and why.
        """
        self.wait_until_done()
        self._is_told = True
        if self._error is not None:
            raise self._error
        return SavedCheckpoint(self._path, self._step, self._num_bytes, self._stall_seconds, self._seconds)

    def wait_until_done(self, seconds: float = math.inf) -> None:
        """Wait for its end, well or not, at most so long."""
        deadline = time.monotonic() + seconds
        while not self._done.wait(min(_SIGN_EVERY, seconds)) and time.monotonic() < deadline:
            if self._has_written:
                self._on_progress()


class CheckpointWriter:
    """Writes the checkpoints of a run into one folder, in which no other run saves. Collective: every rank makes one.

    Args:
        root: the folder of checkpoints, which all ranks see.
        keep_last, keep_every: see `folder.prune`; 0 and 0 keep all.
        on_block: called, from any thread, whenever something was written, or while others are waited for: the save is
            not stuck.
        label: of the group in which ranks tell each other how their writing ended.
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
        #: in the names of what this run has not completed
        self._token = broadcast_object(uuid.uuid4().hex[:8], self._group, 0)
        self._number = 0
        self._staging = Staging()
        self._last: Save | None = None

    def save(self, collect: Callable[[], RankState], about: About, *, background: bool = True) -> Save:
        """Start to save what all ranks hold; every rank calls. Waits for the end of the save before.

        Args:
            collect: gives what this rank holds. What it raises fails the save on all ranks.
            background: return once the tensors are copied; else the save is done, well or not. The process does not
                end before the save has.
        """
        self.finish()
        save = self._last = Save(self.root / folder.name_of(about.step), about.step, self._on_block)
        self._number += 1
        target = folder.temporary(self.root, about.step, f"{self._token}-{self._number}")
        snapshot: _Snapshot | Exception
        try:
            state = collect()
            written = state.written()
            tensors = [box.local for box in written]
            snapshot = state, written, self._staging.copy(tensors) if background else tensors
        except Exception as error:
            snapshot = error
        save._stall_seconds = time.perf_counter() - save._began
        threading.Thread(target=self._run, args=(save, target, about, snapshot), name="colossus-checkpoint").start()
        if not background:
            save.wait_until_done()
            save._stall_seconds = time.perf_counter() - save._began
        return save

    def finish(self) -> None:
        """Wait for the end of the save under way; if it failed and nobody asked, rank 0 says so in the log."""
        if self._last is not None:
            self._last.wait_until_done()
            self._log_failure(self._last)
            self._last = None

    def _log_failure(self, save: Save) -> None:
        if save._error is not None and not save._is_told and self._context.is_logging_rank:
            log.error("%s", save._error)

    def _run(self, save: Save, target: Path, about: About, snapshot: _Snapshot | Exception) -> None:
        try:
            save._num_bytes = self._write(save, target, about, snapshot)
        except Exception as error:
            save._error = CheckpointError(f"{save._path} was not saved: {in_words(error)}")
            save._error.__cause__ = error
        save._seconds = time.perf_counter() - save._began
        save._done.set()
        if not threading.main_thread().is_alive():  # nobody is there to ask
            self._log_failure(save)

    def _write(self, save: Save, target: Path, about: About, snapshot: _Snapshot | Exception) -> int:
        """Write this rank's part, and on rank 0 complete the checkpoint. Returns the bytes of all ranks."""
        mine = self._outcome(lambda: self._write_part(target, snapshot))
        save._has_written = True
        try:
            ended = self._end(target, about, mine)
        except RuntimeError as error:  # of the process group
            if self._context.rank == 0:  # who alone knows whether it has its name
                shutil.rmtree(target, ignore_errors=True)
            raise CheckpointError("a rank has ended, or cannot be reached any more") from error
        if isinstance(ended, str):
            raise CheckpointError(ended)
        return ended

    def _end(self, target: Path, about: About, mine: dict[str, Any] | str) -> int | str:
        """Complete the checkpoint, or remove what there is of it: its bytes, or what went wrong, on all ranks."""
        of_ranks = gather_object(mine, self._group)
        ended = None if of_ranks is None else self._complete(target, about, of_ranks)
        ended = broadcast_object(ended, self._group, 0)
        assert ended is not None
        return ended

    def _outcome(self, work: Callable[[], T]) -> T | str:
        """What work gives, or what went wrong and where, in words."""
        try:
            return work()
        except Exception as error:
            return f"rank {self._context.rank} on {platform.node()}: {in_words(error)}"

    def _write_part(self, target: Path, snapshot: _Snapshot | Exception) -> dict[str, Any]:
        """Write this rank's file, if it writes anything; what the manifest says of it."""
        if isinstance(snapshot, Exception):
            raise snapshot
        state, written, tensors = snapshot
        part: dict[str, Any] = {"values": state.values, "aliases": state.aliases, "file": None, "tensors": []}
        self._prepare(target)
        if written:
            path = target / folder.file_of(self._context.rank)
            part |= write_boxes(path, written, tensors, self._on_block)
        return part

    def _prepare(self, target: Path) -> None:
        """Make the folder to write into."""
        make_folder(self.root)
        target.mkdir(exist_ok=True)
        if self._context.rank == 0:
            folder.remove_left_over(self.root, target)  # its room is needed

    def _complete(self, target: Path, about: About, of_ranks: Sequence[dict[str, Any] | str]) -> int | str:
        """On rank 0: the bytes of the checkpoint, or what went wrong; one that is not complete is removed."""
        ended: int | str | None = problem_among(of_ranks)
        if ended is None:
            parts = [each for each in of_ranks if not isinstance(each, str)]
            ended = self._outcome(lambda: self._put_in_place(target, about, parts))
        if isinstance(ended, str):
            shutil.rmtree(target, ignore_errors=True)
        return ended

    def _put_in_place(self, target: Path, about: About, parts: Sequence[dict[str, Any]]) -> int:
        """Write the manifest, give the checkpoint its name, remove old ones."""
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


def problem_among(of_ranks: Sequence[Any]) -> str | None:
    """What went wrong on the first rank that says so in words, and how many others do; None where none does."""
    problems = [each for each in of_ranks if isinstance(each, str)]
    if not problems:
        return None
    return problems[0] + (f"; and {len(problems) - 1} more ranks failed" if problems[1:] else "")


def write_boxes(
    path: Path, boxes: Sequence[TensorBox], tensors: Iterable[Tensor], on_block: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Write and flush a file of these boxes, whose numbers ``tensors`` gives one after the other.

    Returns:
        What the manifest says of it.
    """
    times = Counter(box.key for box in boxes)
    names = [box.key if times[box.key] == 1 else f"{box.key}[{box.box[0][0]}:{box.box[0][1]}]" for box in boxes]
    header = make_header([(n, box.local.dtype, tuple(box.local.shape)) for n, box in zip(names, boxes, strict=True)])
    crc = write_file(path, header, tensors, on_block)
    rows = []
    for name, box in zip(names, boxes, strict=True):
        start = [low for low, _ in box.box]
        dtype, size = dtype_name(box.local.dtype), tuple(box.local.shape)
        rows.append([box.key, dtype, box.shape, header.offsets[name], start, size])
    return {"file": [path.name, header.num_bytes, crc], "tensors": rows}
