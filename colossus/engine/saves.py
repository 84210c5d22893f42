"""The saves of a run: when one is due, where it goes, how each ended."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from colossus.checkpoint import folder
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.host_memory import HostMemory
from colossus.checkpoint.memory_writer import MemoryWriter
from colossus.checkpoint.writer import CheckpointWriter, Save, SavedCheckpoint
from colossus.config import ConfigError
from colossus.state.run_values import SavedHook
from colossus.state.state import State

log = logging.getLogger("colossus.engine")


class Saves:
    """The saving half of `colossus.engine.checkpoints.Checkpoints`, which describes its attributes."""

    def __init__(self, state: State) -> None:
        self._run, self._state, self._config = state.run, state, state.run.config.checkpoint
        self._world = self._run.context.group(self._run.context.grid.names)
        self._dir = None if self._config.dir is None else str(folder.absolute(self._config.dir))
        self.on_progress: Callable[[], None] = lambda: None
        self.stall_seconds = 0.0
        self.is_restart = self.save_requested = False
        self._writer: CheckpointWriter | None = None
        self._save: Save | None = None
        self._ended: list[SavedCheckpoint] = []
        #: steps done at the start of the last checkpoint; None if it does not have the current state
        self._saved_step: int | None = None
        self._memory: HostMemory | None = None
        self._memory_is_too_small = False
        self._memory_writer: MemoryWriter | None = None
        self._memory_save: Save | None = None

    @property
    def hooks(self) -> Sequence[SavedHook]:
        return self._state.hooks

    @hooks.setter
    def hooks(self, hooks: Sequence[SavedHook]) -> None:
        self._state.hooks = hooks

    @property
    def root(self) -> Path:
        """The folder of this run's checkpoints; ValueError if neither the config nor a launch defines one."""
        if self._dir is None and self._run.folder is None:
            raise ValueError("checkpoint.dir: name a folder for checkpoints; only `colossus launch` has a run folder")
        return folder.root_of(self._dir, self._run.folder or Path())

    def save(self, *, background: bool | None = None) -> Save:
        """Start to save the state as it is now, between two steps; waits for the end of the save before.

        In a loop over ``engine.loader`` call it after `train_step`. A batch that was taken and not trained on yet comes
        again after a resume only if the order of the data depends on the step alone; else a warning says so.

        Args:
            background: whether the step waits for a copy in memory only; by default that of the config.

        Returns:
            A handle to wait for, which raises if the save fails.

        Raises:
            NonFiniteGradients: on all ranks, on an accelerator, for the last step: nothing is saved.
        """
        self.take_weights()
        self._require_own_parameters()
        self._run.gradient_watch.settle()
        background = self._config.background if background is None else background
        self._run.strategy.sync_point()
        self.finish()
        began = time.perf_counter()
        if self._writer is None:
            config = self._config
            self._writer = CheckpointWriter(
                self.root, self._run.context, keep_last=config.keep_last, keep_every=config.keep_every,
                on_block=lambda: self.on_progress(),
            )  # fmt: skip
        with torch.inference_mode(False):  # later saves reuse the memory for copies
            self._save = self._writer.save(self._state.collect, self._state.about(), background=background)
        self._saved_step = self._run.completed_steps
        self.stall_seconds += time.perf_counter() - began
        return self._save

    def request_save(self) -> None:
        """Let the next `after_step` save, whatever ``checkpoint.every`` is: for a hook, on all ranks.

        All hooks have then seen what this one has seen.
        """
        self.save_requested = True

    def after_step(self, *, is_last: bool = False) -> list[SavedCheckpoint]:
        """Save if ``checkpoint.every``, ``memory_every`` or a hook (`request_save`) says so; return ended saves.

        These are saves on the disk, also those of `save`, since the last call. A save that fails is logged as an error
        by rank 0, and the next one is tried.

        Args:
            is_last: whether no step follows: the state is saved, if it is not yet, and the save is waited for.

        Raises:
            CheckpointError: on all ranks, if the save after the last step failed.
        """
        step = self._run.completed_steps
        if self.save_requested:
            self._saved_step = None
        is_due = self.save_requested or (bool(self._config.every) and (is_last or step % self._config.every == 0))
        self.save_requested = False
        if self._save is not None and (is_last or self._save.is_done or (is_due and self._saved_step != step)):
            self.finish()
        every = 0 if self._memory_is_too_small else self._config.memory_every
        if every and step % every == 0 and not is_last and self._host_memory() is not None:
            self._save_in_memory()
        if is_due:
            self._run.strategy.sync_point()
            if self._saved_step != step:
                save = self.save(background=self._config.background and not is_last)
                if is_last:
                    save.wait()
                if is_last or not self._config.background:
                    self.finish()
        ended, self._ended = self._ended, []
        return ended

    def _host_memory(self) -> HostMemory | None:
        """Return the checkpoints in memory; None if the config wants none, or no launcher has made their folder."""
        root = os.environ.get(folder.MEMORY)
        if self._memory is None and root is not None and self._config.memory_every:
            self._memory = HostMemory(Path(root), self._world)
        return self._memory

    def _save_in_memory(self) -> None:
        assert self._memory is not None
        self.take_weights()
        self._require_own_parameters()
        self._run.gradient_watch.settle()
        self._run.strategy.sync_point()
        began = time.perf_counter()
        if self._memory_writer is None:
            context, copies = self._run.context, self._config.memory_copies
            self._memory_writer = MemoryWriter(self._memory, context, copies, lambda: self.on_progress())
        with torch.inference_mode(False):  # later saves reuse the memory for copies
            try:
                self._memory_save = self._memory_writer.save(self._state.collect, self._state.about())
            except ConfigError as error:
                if not self.is_restart:
                    raise
                # it fitted when the run began; with fewer hosts each stores more, and the run should continue
                self._memory_is_too_small = True
                if self._run.context.is_logging_rank:
                    log.warning("%s. Nothing is saved in memory from here on", error)
        self.stall_seconds += time.perf_counter() - began

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

    def finish(self) -> None:
        """Wait for the end of the save under way. If it failed and nobody has waited for it, rank 0 logs the error."""
        if self._save is None:
            return
        assert self._writer is not None
        save, self._save = self._save, None
        began = time.perf_counter()
        self._writer.finish()
        self.stall_seconds += time.perf_counter() - began
        try:
            self._ended.append(save.wait())
        except CheckpointError:
            self._saved_step = None

    def take_weights(self) -> None:
        """Load the weights of a new run before a first save; the loading half implements it."""
        raise NotImplementedError

    def _require_own_parameters(self) -> None:
        if self._run.strategy.is_averaged:
            raise CheckpointError(
                "no checkpoint can be saved or loaded inside of averaged(), strategy.evaluation() or export(), where "
                "parameters are an average: leave that block first"
            )
