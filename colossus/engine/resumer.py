"""The loads of a run: the checkpoint from which it resumes, and after a failure the branch that it leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from colossus.arithmetic import counted
from colossus.checkpoint import folder
from colossus.checkpoint.checkpoint_store import DiskStore, Find
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint, under_key
from colossus.checkpoint.manifest import Manifest, read_manifest
from colossus.checkpoint.rank_errors import on_all_ranks
from colossus.checkpoint.reader import CheckpointReader
from colossus.comm.objects import broadcast_object
from colossus.config import ConfigError
from colossus.data.loader import Loader
from colossus.engine.rollback import Rollback
from colossus.engine.saver import Saver, require_own_parameters
from colossus.state.restore import restore
from colossus.state.run import Run

log = logging.getLogger("colossus.engine")


class Resumed(NamedTuple):
    """The checkpoint from which a run continues.

    Attributes:
        folder: folder of the checkpoint.
        plan: the plan it was saved under, as text.
        is_same_run: whether it is a checkpoint of this run.
    """

    folder: Path
    plan: str
    is_same_run: bool


class Resumer:
    """The loads of a run. Its calls are collective.

    Args:
        run: the run.
        saver: its saves.
    """

    def __init__(self, run: Run, saver: Saver) -> None:
        self._run, self._saver = run, saver
        self._config = run.config.checkpoint

    def resume(self, wanted: str | None) -> Resumed | None:
        """Resume from the checkpoint that the user wants, see `Checkpoints.resume`; return None if there is none."""
        if wanted is None:
            return None
        find = folder.find_latest if wanted == "auto" else folder.locate
        path = self._saver.root if wanted == "auto" else Path(wanted)
        with under_key(f"checkpoint.resume = {wanted!r}"):
            return self.load(lambda damaged: find(path, damaged))

    def resume_restarted(self, until: int | None) -> Resumed | None:
        """Resume from the newest whole save of this run up to a step; return None if there is none.

        Raises:
            CheckpointError: on all ranks, if all saves are later, and older ones were removed.
            RuntimeError: on all ranks, if one in memory cannot be read to its end, and there is none on the disk.
        """
        run, saves, is_first = self._run, bool(self._config.every), self._run.context.is_logging_rank

        def latest_on_disk() -> tuple[bool, int]:
            """Return whether there is a save on the disk, and the step of the newest that is whole."""
            if not saves or not is_first:
                return False, -1
            try:
                latest = folder.find_latest(self._saver.root, until=until)
            except DamagedCheckpoint:  # raised below if there is nothing else to resume from
                return True, -1
            return latest is not None, -1 if latest is None else read_manifest(latest).step

        mine = on_all_ranks(run.world, latest_on_disk, names_ranks=False)
        is_on_disk, step = broadcast_object(mine, run.world, 0)
        resumed = self._load_from_memory(step, until, is_all=not is_on_disk)
        if resumed is None and is_on_disk:
            resumed = self.load(lambda damaged: folder.find_latest(self._saver.root, damaged, until))
        if resumed is None and until is not None and saves:
            on_all_ranks(run.world, lambda: self._require_none_later(until) if is_first else None, names_ranks=False)
        if (memory := self._saver.memory()) is not None:
            memory.remove_later(run.completed_steps if resumed is not None else -1)
        return resumed

    def _require_none_later(self, until: int) -> None:
        """Raise CheckpointError if the run has later saves only: it neither starts anew nor removes them."""
        root = self._saver.root
        later = [path.name for path, step in folder.checkpoint_steps(root).items() if step > until]
        if later and until >= self._config.every:
            raise CheckpointError(
                f"{root}: the run must go back to step {until} or before, but has only later checkpoints: "
                f"{', '.join(later)}. None is removed; `--resume` resumes from the newest nevertheless. A larger "
                f"checkpoint.keep_last (now {self._config.keep_last}) keeps older ones"
            )

    def _load_from_memory(self, later_than: int, until: int | None, *, is_all: bool) -> Resumed | None:
        """Load the newest checkpoint in the hosts' memory that is newer than the disk; return None if there is none.

        Args:
            later_than: step of the newest on the disk.
            until: latest step.
            is_all: whether the disk has no checkpoint that could be loaded if this one fails halfway.
        """
        memory = self._saver.memory()
        reader = memory.get(later_than, until) if memory is not None else None
        if reader is None:
            return None
        try:
            with torch.inference_mode(False), reader:
                restore(self._run, reader)
        except CheckpointError as error:  # on all ranks, for example if another host cannot be reached any more
            problem = f"the checkpoint in memory {reader.folder.name} cannot be loaded: {error}"
            if is_all:  # no CheckpointError, which would end the run: the next attempt may succeed
                raise RuntimeError(
                    f"{problem}; there is none on the disk (checkpoint.every) to load instead"
                ) from error
            if self._run.context.is_logging_rank:
                log.warning("%s", problem)
            return None
        self._saver.saved_step = None
        return Resumed(reader.folder, _plan_of(reader.manifest), True)

    def leave_branch(self, rollback: Rollback) -> None:
        """Remove later saves, leave batches out, and save, so that a later resume skips them."""
        run, step = self._run, self._run.completed_steps
        if self._config.every and run.context.is_logging_rank:
            folder.remove_later(self._saver.root, step)
        skipped = rollback.until + 1 - step if rollback.skip_batches is None else rollback.skip_batches
        if not skipped or run.loaders is None or run.rolled_back == rollback.time:
            return
        loader = run.loaders.train
        if not isinstance(loader, Loader):
            raise ConfigError(
                f"train.on_spike: no batches can be left out of a {type(loader).__name__} that replaces "
                f"engine.loaders.train: pass the data to colossus.initialize, or set train.on_spike.action=raise"
            )
        loader.set_step(loader.step + skipped)
        run.rolled_back = rollback.time
        if run.context.is_logging_rank:
            log.warning("%s after step %d left out", counted(skipped, "batch", "es"), step)
        if self._config.every:
            self._saver.save(background=False).wait()
            self._saver.finish()

    def load(self, find: Find) -> Resumed | None:
        """Load the whole state of the checkpoint that rank 0 finds, see `Checkpoints.load`."""
        manifests: list[Manifest] = []

        def take(reader: CheckpointReader) -> None:
            restore(self._run, reader)
            manifests.append(reader.manifest)

        path = self.read(find, take)
        if path is None:
            return None
        saver = self._saver
        is_same_run = saver.has_root and path.parent.resolve() == saver.root.resolve()
        saver.saved_step = self._run.completed_steps if is_same_run else None
        if is_same_run and self._config.every and self._run.context.is_logging_rank:
            # perhaps an older one: a run that is killed before its next save resumes in this branch
            folder.resume_from(path, self._config.keep_last)
        return Resumed(path, _plan_of(manifests[-1]), is_same_run)

    def read(self, find: Find, take: Callable[[CheckpointReader], object], average: str | None = None) -> Path | None:
        """Read the checkpoint, or the weights, that rank 0 finds (`DiskStore.get`), between two steps."""
        require_own_parameters(self._run)
        self._run.strategy.sync_point()
        self._saver.finish()
        self._saver.saved_step = None
        with torch.inference_mode(False):  # tensors that are made in inference mode could not be trained
            return DiskStore.get(self._run.world, find, take, average)


def _plan_of(manifest: Manifest) -> str:
    return str(manifest.plan.get("text", "another plan"))
