"""Writing checkpoints: every rank its part, in parallel; the manifest and the name last.

No collective: what a rank writes follows from layouts, and that it is written it says in the store. So all of it but
the copy of the tensors can happen in a thread while training goes on.
"""

from __future__ import annotations

import base64
import json
import platform
import shutil
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colossus import __version__
from colossus.checkpoint import folder
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.held_tensor import HeldTensor
from colossus.checkpoint.manifest import MANIFEST, Chunk, FileEntry, Manifest, TensorEntry
from colossus.checkpoint.snapshot import RankState, Staging
from colossus.checkpoint.tensor_file import dtype_name, make_header, write_file
from colossus.comm.objects import broadcast_object
from colossus.context.parallel_context import ParallelContext

#: seconds between two looks into the store, at first and at most
_FIRST_LOOK, _LONGEST_LOOK = 0.002, 0.25


@dataclass(frozen=True)
class About:
    """What a manifest says of a run, beside what ranks write."""

    step: int
    plan: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


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


@dataclass(frozen=True)
class _Snapshot:
    """What this rank adds to a checkpoint, what of it it writes, and where the numbers of these are."""

    state: RankState
    written: Sequence[HeldTensor]
    tensors: Sequence[Tensor]


class Save:
    """A save under way."""

    def __init__(self, path: Path, step: int) -> None:
        self._path, self._step = path, step
        self._began = time.perf_counter()
        self._stall_seconds = self._seconds = 0.0
        self._num_bytes = 0
        self._error: BaseException | None = None
        self._done = threading.Event()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def ended(self) -> None:
        """Wait for its end, well or not."""
        self._done.wait()

    def training_goes_on(self) -> None:
        self._stall_seconds = time.perf_counter() - self._began

    def run(self, write: Callable[[], int]) -> None:
        """Run what writes the checkpoint and returns its bytes."""
        try:
            self._num_bytes = write()
        except BaseException as error:
            self._error = error
        self._seconds = time.perf_counter() - self._began
        self._done.set()

    def wait(self) -> SavedCheckpoint:
        """Wait for its end.

        Raises:
            CheckpointError: on all ranks, when it failed on any: which one, and why.
        """
        self.ended()
        if self._error is not None:
            raise self._error
        return SavedCheckpoint(self._path, self._step, self._num_bytes, self._stall_seconds, self._seconds)


class CheckpointWriter:
    """Writes the checkpoints of a run into one folder. Collective: every rank makes one.

    Args:
        root: the folder of checkpoints, which all ranks see.
        keep_last, keep_every: see `folder.prune`; 0 and 0 keep all.
        on_block: called from the writing thread whenever something was written: it is not stuck.
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
        self.root, self._context, self._on_block = root, context, on_block
        self._keep_last, self._keep_every = keep_last, keep_every
        #: in the names of what this run has not completed
        self._token = broadcast_object(uuid.uuid4().hex[:8], context.group(context.grid.names), 0)
        self._store = context.store() if context.world_size > 1 else None
        self._number = 0
        self._staging = Staging()
        self._last: Save | None = None

    def save(self, collect: Callable[[], RankState], about: About, *, background: bool = True) -> Save:
        """Start to save what all ranks hold; every rank calls. Waits for the end of the save before.

        Args:
            collect: gives what this rank holds. What it raises fails the save on all ranks.
            background: return once the tensors are copied; else the save is done, well or not.
        """
        save = Save(self.root / folder.name_of(about.step), about.step)
        if self._last is not None:
            self._last.ended()
        self._last = save
        self._number += 1
        number = self._number
        snapshot: _Snapshot | Exception
        try:
            snapshot = self._take(collect(), copy=background)
        except Exception as error:
            snapshot = error

        def write() -> int:
            return self._write(number, about, snapshot)

        if background:
            save.training_goes_on()
            threading.Thread(target=save.run, args=(write,), name="colossus-checkpoint", daemon=True).start()
        else:
            save.run(write)
            save.training_goes_on()
        return save

    def _take(self, state: RankState, *, copy: bool) -> _Snapshot:
        written = state.written()
        tensors = [held.local for held in written]
        return _Snapshot(state, written, self._staging.copy(tensors) if copy else tensors)

    # -- what a thread does -------------------------------------------------------------------------------

    def _write(self, number: int, about: About, snapshot: _Snapshot | Exception) -> int:
        """Write this rank's part, and on rank 0 complete the checkpoint. Returns the bytes of all ranks."""
        target = folder.temporary(self.root, about.step, self._token)
        try:
            if isinstance(snapshot, Exception):
                raise snapshot
            mine: dict[str, Any] = {"part": self._write_part(target, snapshot)}
        except Exception as error:
            mine = {"problem": f"rank {self._context.rank} on {platform.node()}: {in_words(error)}"}
        self._tell(f"checkpoint/{number}/part/{self._context.rank}", mine)
        outcome = f"checkpoint/{number}/outcome"
        if self._context.rank == 0:
            told: dict[str, Any]
            try:
                told = {"num_bytes": self._complete(number, target, about, mine)}
            except Exception as error:
                shutil.rmtree(target, ignore_errors=True)
                told = {"problem": in_words(error)}
            self._tell(outcome, told)
        else:
            told = self._hear(outcome)
        if "problem" in told:
            raise CheckpointError(f"{self.root / folder.name_of(about.step)} was not saved: {told['problem']}")
        return int(told["num_bytes"])

    def _write_part(self, target: Path, snapshot: _Snapshot) -> dict[str, Any]:
        """Write this rank's file, if it writes anything; what the manifest says of it."""
        state, written = snapshot.state, snapshot.written
        part: dict[str, Any] = {"values": state.values, "aliases": state.aliases, "file": None, "tensors": []}
        target.mkdir(parents=True, exist_ok=True)
        if not written:
            return part
        name = f"rank-{self._context.rank:05d}.safetensors"
        header = make_header([(held.key, held.local.dtype, tuple(held.local.shape)) for held in written])
        crc = write_file(target / name, header, snapshot.tensors, self._on_block)
        part["file"] = [name, header.num_bytes, crc]
        for held in written:
            start = [low for low, _ in held.box]
            part["tensors"].append(
                [held.key, dtype_name(held.local.dtype), held.shape, header.offsets[held.key], start, held.local.shape]
            )
        return part

    def _complete(self, number: int, target: Path, about: About, mine: dict[str, Any]) -> int:
        """On rank 0: hear of all parts, write the manifest, give the checkpoint its name, remove old ones."""
        told = [mine, *(self._hear(f"checkpoint/{number}/part/{rank}") for rank in range(1, self._context.world_size))]
        problems = [each["problem"] for each in told if "problem" in each]
        if problems:
            more = f"; and {len(problems) - 1} more ranks failed" if len(problems) > 1 else ""
            raise CheckpointError(problems[0] + more)
        manifest = merge([each["part"] for each in told], about)
        for name, file in manifest.files.items():
            try:
                size = (target / name).stat().st_size
            except FileNotFoundError:
                raise CheckpointError(
                    f"{target / name} was written, but rank 0 on {platform.node()} does not see it: checkpoint.dir "
                    f"must be a folder that all nodes share"
                ) from None
            if size != file.num_bytes:
                raise CheckpointError(f"{target / name} has {size} bytes after {file.num_bytes} were written")
        folder.write_flushed(target / MANIFEST, manifest.to_bytes())
        folder.require_files(target)
        folder.put_in_place(target, self.root, about.step)
        if self._keep_last:
            folder.prune(self.root, self._keep_last, self._keep_every)
        return manifest.num_bytes

    def _tell(self, key: str, value: Any) -> None:
        if self._store is not None:
            self._store.set(key, base64.b64encode(zlib.compress(json.dumps(value).encode(), 1)).decode())

    def _hear(self, key: str) -> Any:
        """What another rank tells, as soon as it does. Never waits inside of the store: others use it, too."""
        assert self._store is not None
        look = _FIRST_LOOK
        while not self._store.check([key]):
            self._on_block()
            time.sleep(look)
            look = min(2 * look, _LONGEST_LOOK)
        return json.loads(zlib.decompress(base64.b64decode(self._store.get(key))))


def merge(parts: Sequence[Mapping[str, Any]], about: About) -> Manifest:
    """The manifest of a checkpoint from what its ranks say of their parts."""
    files: dict[str, FileEntry] = {}
    found: dict[str, tuple[str, tuple[int, ...], list[Chunk]]] = {}
    values: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    for part in parts:
        values |= part["values"]
        aliases |= part["aliases"]
        if part["file"] is not None:
            name, num_bytes, crc = part["file"]
            files[name] = FileEntry(num_bytes, crc)
        for key, dtype, shape, offset, start, size in part["tensors"]:
            held = found.setdefault(key, (dtype, tuple(shape), []))
            if held[:2] != (dtype, tuple(shape)):
                raise CheckpointError(f"{key} is {held[0]} {held[1]} on one rank and {dtype} {tuple(shape)} on another")
            held[2].append(Chunk(name, offset, tuple(start), tuple(size)))
    return Manifest(
        about.step,
        time.time(),
        {"colossus": __version__, "torch": torch.__version__, "python": platform.python_version()},
        about.plan,
        about.config,
        files,
        {key: TensorEntry(dtype, shape, tuple(chunks)) for key, (dtype, shape, chunks) in found.items()},
        aliases,
        values,
    )


def in_words(error: BaseException) -> str:
    """An error of the file system with its reason and its path, any other as it is."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
