"""The saves of a run: when one is due, where it goes, how each ended."""

from __future__ import annotations

import logging
import math
import os
import time
from functools import partial
from pathlib import Path

import torch

from colossus.checkpoint import folder
from colossus.checkpoint.checkpoint_store import DiskStore, Store
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.memory_store import MemoryStore
from colossus.checkpoint.save import Save, SavedCheckpoint
from colossus.config import ConfigError
from colossus.state.collect import about, collect
from colossus.state.run import Run

log = logging.getLogger("colossus.engine")


class Saver:
    """The saves of a run, on the disk and in the memory of the hosts. Its calls are collective.

    Args:
        run: the run.

    Attributes:
        saved_step: steps done at the start of the last save; None if it does not have the current state.
        stall_seconds: time that training has waited for saves.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._config = run, run.config.checkpoint
        self._dir = None if self._config.dir is None else str(folder.absolute(self._config.dir))
        self.saved_step: int | None = None
        self.stall_seconds = 0.0
        self._disk: DiskStore | None = None
        self._memory: MemoryStore | None = None
        self._memory_is_too_small = False
        #: saves under way
        self._save: Save | None = None
        self._memory_save: Save | None = None
        self._ended: list[SavedCheckpoint] = []

    @property
    def has_root(self) -> bool:
        return self._dir is not None or self._run.folder is not None

    @property
    def root(self) -> Path:
        """The folder of this run's checkpoints; ValueError if neither the config nor a launch defines one."""
        if not self.has_root:
            raise ValueError("checkpoint.dir: name a folder for checkpoints; only `colossus launch` has a run folder")
        return folder.root_of(self._dir, self._run.folder or Path())

    def memory(self) -> MemoryStore | None:
        """Return the checkpoints in memory; None if the config wants none, or no launcher has made their folder."""
        root = os.environ.get(folder.MEMORY)
        if self._memory is None and root is not None and self._config.memory_every:
            self._memory = MemoryStore(Path(root), self._run.context, self._config.memory_copies, self._run.on_progress)
        return self._memory

    def save(self, *, background: bool | None = None) -> Save:
        """Start to save on the disk, see `Checkpoints.save`."""
        background = self._config.background if background is None else background
        self._prepare()
        self.finish()
        began = time.perf_counter()
        if self._disk is None:
            keep_last, keep_every = self._config.keep_last, self._config.keep_every
            self._disk = DiskStore(
                self.root, self._run.context, keep_last=keep_last, keep_every=keep_every, on_block=self._run.on_progress
            )
        self._save = self._put(self._disk, background, began)
        self.saved_step = self._run.completed_steps
        return self._save

    def after_step(self, *, is_last: bool, is_requested: bool, is_restart: bool) -> list[SavedCheckpoint]:
        """Start the saves that are due, see `Checkpoints.after_step`.

        Args:
            is_last: whether no step follows.
            is_requested: whether a hook wants a save.
            is_restart: whether a memory that is too small is no error: it fitted when the run began, and with fewer
                hosts each stores more.
        """
        step = self._run.completed_steps
        if is_requested:
            self.saved_step = None
        is_due = is_requested or (bool(self._config.every) and (is_last or step % self._config.every == 0))
        # ranks see `is_done` at different times, and finishing a failed save clears what all decide by below
        if self._save is not None and (is_last or (self.saved_step != step if is_due else self._save.is_done)):
            self.finish()
        every = 0 if self._memory_is_too_small else self._config.memory_every
        if every and step % every == 0 and not is_last and (memory := self.memory()) is not None:
            self._save_in_memory(memory, is_restart=is_restart)
        if is_due:
            self._run.strategy.sync_point()
            if self.saved_step != step:
                save = self.save(background=self._config.background and not is_last)
                if is_last:
                    save.wait()
                if is_last or not self._config.background:
                    self.finish()
        ended, self._ended = self._ended, []
        return ended

    def _save_in_memory(self, memory: MemoryStore, *, is_restart: bool) -> None:
        self._prepare()
        try:
            self._memory_save = self._put(memory, True, time.perf_counter())
        except ConfigError as error:
            if not is_restart:
                raise
            self._memory_is_too_small = True
            if self._run.context.is_logging_rank:
                log.warning("%s. Nothing is saved in memory from here on", error)

    def _prepare(self) -> None:
        require_own_parameters(self._run)
        self._run.gradient_watch.settle()
        self._run.strategy.sync_point()

    def _put(self, store: Store, background: bool, began: float) -> Save:
        with torch.inference_mode(False):  # later saves reuse the memory for copies
            save = store.put(partial(collect, self._run), about(self._run), background=background)
        self.stall_seconds += time.perf_counter() - began
        return save

    def finish(self) -> None:
        """Wait for the end of the save under way. If it failed and nobody has waited for it, rank 0 logs the error."""
        if self._save is None:
            return
        assert self._disk is not None
        save, self._save = self._save, None
        began = time.perf_counter()
        self._disk.finish()
        self.stall_seconds += time.perf_counter() - began
        try:
            self._ended.append(save.wait())
        except CheckpointError:
            self.saved_step = None

    def finish_all(self, seconds: float = math.inf) -> None:
        """Call `finish`, and wait for the end of the save in memory under way, for at most this time."""
        self.finish()
        if self._memory_save is not None:
            self._memory_save.wait_until_done(seconds)

    def close(self) -> None:
        """Wait for the saves under way. After it nothing is saved in memory, nor read there by other hosts."""
        self.finish_all()
        if self._memory is not None:
            self._memory.close()


def require_own_parameters(run: Run) -> None:
    """Raise CheckpointError where the parameters are an average for a while."""
    if run.strategy.is_averaged:
        raise CheckpointError(
            "no checkpoint can be saved or loaded inside of averaged(), strategy.evaluation() or export(), where "
            "parameters are an average: leave that block first"
        )
