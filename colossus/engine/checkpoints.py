"""The checkpoints of a run: when they are saved, what a save that fails does, where a run goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from colossus.checkpoint import folder
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.writer import CheckpointWriter, Save, SavedCheckpoint
from colossus.comm.objects import broadcast_object
from colossus.engine.hooks import Hook
from colossus.engine.state.engine_state import EngineState

if TYPE_CHECKING:
    from colossus.engine.engine import Engine

log = logging.getLogger("colossus.engine")


class Checkpoints:
    """Saves and loads the whole state of an engine. What is not told otherwise is collective: every rank calls.

    `fit` follows the config's section ``checkpoint``: it resumes at its start, saves every so many steps and after the
    last one. In a loop of your own call `resume` before and `after_step` in it, or `save` and `load` as you like.

    Attributes:
        hooks: whose state belongs to the run; `fit` sets them.
        resume_from: what `resume` loads: "auto" (the latest of this run), a folder, None; as the config has it.
        resumed_from: the checkpoint that was loaded, None where none was.
        resumed_plan: the plan it was saved under, in words.
        stall_seconds: that training has waited for checkpoints so far, since the engine was made.
        on_progress: called from any thread when a part of a checkpoint was written or read: nothing is stuck.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._config = engine, engine.config.checkpoint
        self._state = EngineState(engine)
        self._writer: CheckpointWriter | None = None
        self._save: Save | None = None
        self._failed: CheckpointError | None = None
        #: step of the checkpoint that has the state as it is
        self._last_step: int | None = None
        self.resume_from = self._config.resume
        self.resumed_from: Path | None = None
        self.resumed_plan = ""
        self.stall_seconds = 0.0
        self.on_progress: Callable[[], None] = lambda: None

    @property
    def hooks(self) -> Sequence[Hook]:
        return self._state.hooks

    @hooks.setter
    def hooks(self, hooks: Sequence[Hook]) -> None:
        self._state.hooks = list(hooks)

    @property
    def root(self) -> Path:
        """The folder of this run's checkpoints.

        Raises:
            ValueError: outside of a launch, where the config does not name it.
        """
        if self._config.dir is None and self._engine.run_dir is None:
            raise ValueError("checkpoint.dir: name a folder for checkpoints; only `colossus launch` has a run folder")
        return folder.root_of(self._config.dir, self._engine.run_dir or Path())

    # -- saving -------------------------------------------------------------------------------------------

    def save(self, *, background: bool | None = None) -> Save:
        """Start to save the state as it is now; waits for the end of the save before.

        Args:
            background: whether the step waits for a copy in memory only; by default as the config has it.

        Returns:
            What can be waited for; it raises there what went wrong.
        """
        background = self._config.background if background is None else background
        began = time.perf_counter()
        for hook in self.hooks:
            hook.on_save(self._engine)
        if self._writer is None:
            self._writer = CheckpointWriter(
                self.root,
                self._engine.context,
                keep_last=self._config.keep_last,
                keep_every=self._config.keep_every,
                on_block=lambda: self.on_progress(),
            )
        save = self._writer.save(self._state.collect, self._state.about(), background=background)
        self.stall_seconds += time.perf_counter() - began
        return save

    def after_step(self, *, is_last: bool = False) -> list[SavedCheckpoint]:
        """Save if the config's ``checkpoint.every`` says so; tell which saves have ended since the last call.

        Args:
            is_last: no step follows: save what is not saved yet, and wait until it is.

        Raises:
            CheckpointError: under ``checkpoint.on_error = "stop"``, when a save failed and all ranks know it.
        """
        if not self._config.every:
            return []
        step = self._engine.completed_steps
        is_due = (is_last or step % self._config.every == 0) and step != self._last_step
        told = []
        if self._save is not None and (is_due or is_last or self._save.is_done):
            told += self._settle(is_last=False)
        is_due = is_due or (is_last and step != self._last_step)  # the save under way may just have failed
        if is_due and self._failed is None:
            self._save, self._last_step = self.save(background=self._config.background and not is_last), step
            if is_last or not self._config.background:
                told += self._settle(is_last=is_last)
        if self._failed is not None:
            if is_last or not self._config.background:
                raise self._failed
            self._engine.request_stop()  # ranks hear of it at different steps; they stop, and raise, after the same
        return told

    def _settle(self, *, is_last: bool) -> list[SavedCheckpoint]:
        """The save under way, which is waited for; one that failed is told, or kept for all ranks to raise."""
        save, self._save = self._save, None
        assert save is not None
        began = time.perf_counter()
        save.ended()
        self.stall_seconds += time.perf_counter() - began
        try:
            return [save.wait()]
        except CheckpointError as error:
            self._last_step = None
            if self._config.on_error == "stop" or is_last:  # nothing is left to go on with
                self._failed = error
            elif self._engine.context.is_logging_rank:
                log.error("%s; training goes on", error)
        return []

    # -- loading ------------------------------------------------------------------------------------------

    def resume(self) -> Path | None:
        """Load what `resume_from` names, once; nothing when it names nothing.

        Raises:
            CheckpointError: on all ranks, when it is no whole checkpoint of this model.
        """
        wanted = self.resume_from
        if wanted is None or self.resumed_from is not None:
            return None
        found, problem = None, None
        if self._engine.context.is_logging_rank:
            try:
                found = folder.find_latest(self.root) if wanted == "auto" else folder.locate(Path(wanted))
            except CheckpointError as error:
                problem = str(error)
        world = self._engine.context.group(self._engine.context.grid.names)
        found, problem = broadcast_object((found, problem), world, 0)
        if problem is not None:
            raise CheckpointError(f"checkpoint.resume = {wanted!r}: {problem}")
        if found is not None:
            self.load(found)
        return found

    def load(self, path: Path | str) -> None:
        """Take the whole state of a checkpoint: the run goes on behind its step, under any plan.

        Raises:
            CheckpointError: on all ranks, before anything is changed, when it is no whole checkpoint of this model.
        """
        with CheckpointReader(folder.locate(Path(path))) as reader:
            self._state.restore(reader, self.on_progress)
            self.resumed_from, self.resumed_plan = reader.folder, str(reader.manifest.plan.get("text", "another plan"))
        is_own = reader.folder.parent.resolve() == self.root.resolve() if self._has_root else False
        self._last_step = self._engine.completed_steps if is_own else None

    @property
    def _has_root(self) -> bool:
        return self._config.dir is not None or self._engine.run_dir is not None
