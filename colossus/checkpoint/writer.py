"""Writing checkpoints: every rank its part, in parallel; the manifest and the name last.

No collective but what `collect` does: what a rank writes follows from layouts, and that it is written it says in the
store. So all of it but the copy of the tensors can happen in a thread while training goes on.
"""

from __future__ import annotations

import logging
import platform
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from colossus.checkpoint import folder
from colossus.checkpoint.claim import Claim
from colossus.checkpoint.durable import make_folder, naming, write_flushed
from colossus.checkpoint.errors import CheckpointError, in_words
from colossus.checkpoint.held_tensor import HeldTensor
from colossus.checkpoint.manifest import MANIFEST, About, merge
from colossus.checkpoint.messages import Messages, RankProblem
from colossus.checkpoint.save import Save, SavedCheckpoint
from colossus.checkpoint.snapshot import RankState, Staging
from colossus.checkpoint.tensor_file import dtype_name, make_header, write_file
from colossus.comm.objects import broadcast_object
from colossus.context.parallel_context import ParallelContext

__all__ = ["About", "CheckpointWriter", "Save", "SavedCheckpoint"]

log = logging.getLogger("colossus.checkpoint")


@dataclass(frozen=True)
class _Snapshot:
    """What this rank adds to a checkpoint, what of it it writes, and where the numbers of these are."""

    state: RankState
    written: Sequence[HeldTensor]
    tensors: Sequence[Tensor]


class CheckpointWriter:
    """Writes the checkpoints of a run into one folder. Collective: every rank makes one.

    Args:
        root: the folder of checkpoints, which all ranks see.
        keep_last, keep_every: see `folder.prune`; 0 and 0 keep all.
        on_block: called from the writing thread whenever something was written, or a rank that is waited for has given
            a sign of life: the save is not stuck.
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
        self.root, self._context, self._on_block = folder.absolute(root), context, on_block
        self._keep_last, self._keep_every = keep_last, keep_every
        #: in the names of what this run has not completed
        self._token = broadcast_object(uuid.uuid4().hex[:8], context.group(context.grid.names), 0)
        self._messages = Messages(context, on_block, self._token)
        self._number = 0
        self._staging = Staging()
        self._last: Save | None = None
        self._claim: Claim | None = None
        #: Ctrl-C, say, of which the other ranks were told
        self._interrupt: BaseException | None = None
        #: whether a save has been completed here: the folder must then be there
        self._has_saved = False

    def save(self, collect: Callable[[], RankState], about: About, *, background: bool = True) -> Save:
        """Start to save what all ranks hold; every rank calls. Waits for the end of the save before.

        Args:
            collect: gives what this rank holds. What it raises fails the save on all ranks.
            background: return once the tensors are copied; else the save is done, well or not. The process does not
                end before the save has.
        """
        save = Save(self.root / folder.name_of(about.step), about.step)
        self.finish()
        self._last = save
        self._number += 1
        target = folder.temporary(self.root, about.step, f"{self._token}-{self._number}")
        self._messages.begin()
        snapshot: _Snapshot | BaseException
        try:
            snapshot = self._take(collect(), copy=background)
        except BaseException as error:
            snapshot = error

        def write() -> int:
            return self._write(target, about, snapshot, save.somebody_waits)

        save.training_goes_on()
        if not background or not self._start(save, write):
            save.is_awaited = True
            save.run(write)
            save.training_goes_on()
        interrupt = snapshot if isinstance(snapshot, BaseException) else self._interrupt
        if interrupt is not None and not isinstance(interrupt, Exception):
            self._interrupt = None
            raise interrupt
        return save

    def _start(self, save: Save, write: Callable[[], int]) -> bool:
        def run() -> None:
            save.run(write)
            if not threading.main_thread().is_alive():  # nobody is there to ask
                self._tell_failure(save)

        try:
            threading.Thread(target=run, name="colossus-checkpoint", daemon=False).start()
        except RuntimeError:  # no more threads
            return False
        return True

    def finish(self, patience: float | None = None) -> None:
        """Wait for the end of the save under way; if it failed and nobody asked, rank 0 says so in the log.

        Args:
            patience: seconds without a sign of life after which another rank is given up, from now on.
        """
        if patience is not None:
            self._messages.patience = min(patience, self._messages.patience)
        if self._last is not None:
            self._last.ended()
            self._tell_failure(self._last)
            self._last = None

    def close(self) -> None:
        """Wait for the end of the save under way, and let go of the folder."""
        self.finish()
        if self._claim is not None:
            self._claim.release()

    def _tell_failure(self, save: Save) -> None:
        if (error := save.untold()) is not None and self._context.is_logging_rank:
            log.error("%s", error)

    def _take(self, state: RankState, *, copy: bool) -> _Snapshot:
        written = state.written()
        tensors = [held.local for held in written]
        return _Snapshot(state, written, self._staging.copy(tensors) if copy else tensors)

    # -- what a thread does -------------------------------------------------------------------------------

    def _write(
        self, target: Path, about: About, snapshot: _Snapshot | BaseException, is_awaited: Callable[[], bool]
    ) -> int:
        """Write this rank's part, and on rank 0 complete the checkpoint. Returns the bytes of all ranks."""
        where = f"{self.root / folder.name_of(about.step)} was not saved"
        try:
            mine = self._outcome(lambda: {"part": self._write_part(target, snapshot)})
            outcome = None
            if self._messages.is_first:
                outcome = self._outcome(lambda: {"num_bytes": self._complete(target, about, mine, is_awaited)})
                if "problem" in outcome:
                    shutil.rmtree(target, ignore_errors=True)
            else:
                self._messages.tell_part(mine)
            told = self._messages.share_outcome(outcome, is_awaited)
        except Exception as error:
            raise CheckpointError(f"{where}: {in_words(error)}") from error
        finally:
            self._messages.end()
        if "problem" in told:
            raise CheckpointError(f"{where}: {told['problem']}")
        self._has_saved = True
        return int(told["num_bytes"])

    def _outcome(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What work gives, or what went wrong and where, in words."""
        try:
            return work()
        except RankProblem as error:
            return {"problem": str(error)}
        except BaseException as error:
            self._interrupt = None if isinstance(error, Exception) else error
            return {"problem": f"rank {self._context.rank} on {platform.node()}: {in_words(error)}"}

    def _write_part(self, target: Path, snapshot: _Snapshot | BaseException) -> dict[str, Any]:
        """Write this rank's file, if it writes anything; what the manifest says of it."""
        if isinstance(snapshot, BaseException):
            raise snapshot
        state, written = snapshot.state, snapshot.written
        part: dict[str, Any] = {"values": state.values, "aliases": state.aliases, "file": None, "tensors": []}
        self._make_folder(target)
        if not written:
            return part
        file = f"rank-{self._context.rank:05d}.safetensors"
        names = _names_in_file(written)
        header = make_header(
            [(name, held.local.dtype, tuple(held.local.shape)) for name, held in zip(names, written, strict=True)]
        )
        with naming(target / file):
            crc = write_file(target / file, header, snapshot.tensors, self._note_progress)
        part["file"] = [file, header.num_bytes, crc]
        for name, held in zip(names, written, strict=True):
            start = [low for low, _ in held.box]
            part["tensors"].append(
                [held.key, dtype_name(held.local.dtype), held.shape, header.offsets[name], start, held.local.shape]
            )
        return part

    def _make_folder(self, target: Path) -> None:
        """The temporary folder of a save.

        Raises:
            CheckpointError: when the folder of checkpoints is gone. A mount point whose file system has vanished is an
                empty folder of the local disk: writing there would help nobody.
        """
        if not self._has_saved:
            make_folder(self.root)
        elif not self.root.exists():
            raise CheckpointError(
                f"{self.root} has vanished since the last checkpoint: when it is there again, the next one is saved"
            )
        target.mkdir(exist_ok=True)
        if self._messages.is_first:
            self._sweep(target)

    def _note_progress(self) -> None:
        self._messages.note_progress()
        self._on_block()

    def _complete(self, target: Path, about: About, mine: dict[str, Any], is_awaited: Callable[[], bool]) -> int:
        """On rank 0: hear of all parts, write the manifest, give the checkpoint its name, remove old ones."""
        told = [mine, *self._messages.hear_parts(is_awaited)]
        problems = [each["problem"] for each in told if "problem" in each]
        if problems:
            more = f"; and {len(problems) - 1} more ranks failed" if len(problems) > 1 else ""
            raise RankProblem(problems[0] + more)
        manifest = merge([each["part"] for each in told], about)
        for name, data in about.files.items():
            write_flushed(target / name, data)
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
        write_flushed(target / MANIFEST, manifest.to_bytes())
        folder.require_files(target)
        folder.put_in_place(target, self.root, about.step)
        self._prune()
        return manifest.num_bytes

    def _sweep(self, target: Path) -> None:
        """Remove what a killed run, or a save that failed, has left unfinished: its room is needed."""
        if self._claim is None or self._claim.is_of_others:
            is_told = self._claim is not None
            self._claim = Claim(self.root)
            if self._claim.is_of_others and not is_told:
                log.warning(
                    "%s: another run saves its checkpoints here, too, or another engine of this process, and each "
                    "removes what the other one keeps: give one of them a checkpoint.dir of its own",
                    self.root,
                )
        if self._claim.is_held:
            folder.remove_left_over(self.root, target)

    def _prune(self) -> None:
        """Remove old checkpoints. That the new one is complete does not depend on it."""
        try:
            folder.prune(self.root, self._keep_last, self._keep_every)
        except (OSError, CheckpointError) as error:
            log.warning("%s: old checkpoints cannot be removed: %s", self.root, in_words(error))


def _names_in_file(written: Sequence[HeldTensor]) -> list[str]:
    """What each tensor is called in the rank's file: its key, with the rows where it has several boxes of one."""
    times = Counter(held.key for held in written)
    return [held.key if times[held.key] == 1 else f"{held.key}[{held.box[0][0]}:{held.box[0][1]}]" for held in written]
