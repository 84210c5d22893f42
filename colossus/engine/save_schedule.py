"""The saves of a run: when one is due, how each ended, and what becomes of the run when one failed."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from colossus.checkpoint import folder
from colossus.checkpoint.durable import make_folder
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.rank_errors import on_all_ranks
from colossus.checkpoint.writer import CheckpointWriter, Save, SavedCheckpoint
from colossus.data.loader import Loader
from colossus.engine.results import addend
from colossus.state.state import State

log = logging.getLogger("colossus.engine")


class SaveSchedule:
    """The part of `Checkpoints` that saves.

    Attributes:
        stall_seconds: that training has waited for checkpoints so far, since the engine was made.
        on_progress: called from any thread when a part of a checkpoint was written or read: nothing is stuck.
    """

    def __init__(self, state: State) -> None:
        self._run, self._state, self._config = state.run, state, state.run.config.checkpoint
        self.on_progress: Callable[[], None] = lambda: None
        # what it means now, whatever the working directory will be
        self._dir = None if self._config.dir is None else str(folder.absolute(self._config.dir))
        self._writer: CheckpointWriter | None = None
        self.stall_seconds = 0.0
        #: steps done when the last checkpoint was begun; None where none has the state as it is
        self._saved_step: int | None = None
        self._save: Save | None = None
        self._ended: list[SavedCheckpoint] = []
        #: under ``on_error = "stop"``: kept for the next step that is due
        self._failed: CheckpointError | None = None
        self._is_in_step = self._is_root_known = False

    @property
    def _has_root(self) -> bool:
        return self._config.dir is not None or self._run.folder is not None

    @property
    def root(self) -> Path:
        """The folder of this run's checkpoints; a ValueError outside of a launch, where the config does not name it."""
        if not self._has_root:
            raise ValueError("checkpoint.dir: name a folder for checkpoints; only `colossus launch` has a run folder")
        return folder.root_of(self._dir, self._run.folder or Path())

    def _require_root(self) -> None:
        """Where checkpoints are due, find now that they have nowhere to go, and not at the first save. Collective.

        Raises:
            ValueError: without a folder, on all ranks.
            CheckpointError: on all ranks, where rank 0 cannot write to it.
        """
        if self._config.every and not self._is_root_known:
            root, world = self.root, self._run.context.group(self._run.context.grid.names)
            first = self._run.context.is_logging_rank
            on_all_ranks(world, lambda: _try_to_write(root) if first else None, tells_ranks=False)
            self._is_root_known = True

    def save(self, *, background: bool | None = None) -> Save:
        """Start to save the state as it is now, between two steps; waits for the end of the save before.

        In a loop over ``engine.loader`` call it after `train_step`: a batch that was taken and not trained on yet comes
        again when the run goes on only where the order of the data follows from the step; else a warning says so.

        Args:
            background: whether the step waits for a copy in memory only; by default as the config has it.

        Returns:
            What can be waited for; it raises there what went wrong.
        """
        self._require_between_steps("saved")
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
        with torch.inference_mode(False):  # the memory for copies is kept
            self._save = self._writer.save(self._state.collect, self._state.about(), background=background)
        self._saved_step = self._run.completed_steps
        self.stall_seconds += time.perf_counter() - began
        return self._save

    def after_step(self, *, is_last: bool = False) -> list[SavedCheckpoint]:
        """Save if ``checkpoint.every`` says so; tell which saves have ended since the last call.

        Args:
            is_last: no step follows: save what is not saved yet, and wait until it is.

        Raises:
            CheckpointError: on all ranks, when the save after the last step failed; under ``checkpoint.on_error =
                "stop"`` after the next step that is due when any did. A later call tries again.
        """
        if not self._config.every:
            return []
        self._require_root()
        stops = self._config.on_error == "stop"
        is_due = is_last or self._run.completed_steps % self._config.every == 0
        if self._save is not None and (is_due or self._save.is_done):
            self._settle(is_raised=is_due and stops, then="; training stops" if stops else "; training goes on")
        if is_due:
            self._run.strategy.sync_point()
            self._raise_failed()
            if self._saved_step != self._run.completed_steps:
                self.save(background=self._config.background and not is_last)
                if is_last or not self._config.background:
                    self._settle(is_raised=is_last or stops, then="; training goes on")
                    self._raise_failed()
        ended, self._ended = self._ended, []
        return ended

    def finish(self) -> None:
        """Wait for the end of the save under way. If it failed, and nobody was told, rank 0 says so in the log."""
        if self._save is not None:
            self._settle()

    def _settle(self, *, is_raised: bool = False, then: str = "") -> None:
        """`finish`: all ranks hear the same of a save, if not at the same time.

        Args:
            is_raised: what went wrong is raised next, and not told.
            then: what becomes of the run.
        """
        save, self._save = self._save, None
        assert save is not None
        began = time.perf_counter()
        save.wait_until_done()
        self.stall_seconds += time.perf_counter() - began
        error = save.error_not_raised()
        try:
            self._ended.append(save.wait())
        except CheckpointError as failed:
            self._saved_step = None
            if error is None:
                return
            stops = self._config.on_error == "stop"
            if is_raised or stops:
                self._failed = failed
            if is_raised:
                return
            if stops:
                self._run.stop = addend(True, None)
            if self._run.context.is_logging_rank:
                log.error("%s%s", failed, then)

    def _raise_failed(self) -> None:
        """What went wrong. It is over then: the next save that is due is tried."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    # -- steps and loads ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def during_step(self) -> Iterator[None]:
        """Around a train step: nothing can be saved or loaded inside."""
        if self._run.strategy.is_averaged:
            raise RuntimeError(
                "a step cannot be trained inside of strategy.evaluation() or export(): the parameters are the average "
                "of the replicas there, and the replica's own come back at its end; leave that block first"
            )
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False
            loaders = self._run.loaders
            if loaders is not None and isinstance(loaders.train, Loader):
                loaders.train.num_untrained = 0

    def _require_between_steps(self, what: str) -> None:
        if self._is_in_step:
            raise CheckpointError(
                f"a checkpoint cannot be {what} inside of a train step: weights, optimizer and place in the data are "
                f"of different steps there; do it after engine.train_step, or in a hook's on_step_end"
            )
        if self._run.strategy.is_averaged:
            raise CheckpointError(
                f"a checkpoint cannot be {what} inside of strategy.evaluation() or export(): the parameters are the "
                f"average of the replicas there, not each replica's own; leave that block first"
            )

    def _goes_on_from(self, found: Path) -> None:
        """All state is that of a checkpoint now. If it is an older one of a run that saves here, ``latest`` names it:
        a run that is killed before its next save goes on with this branch."""
        is_own = self._has_root and found.parent.resolve() == self.root.resolve()
        self._saved_step = self._run.completed_steps if is_own else None
        if is_own and self._config.every and self._run.context.is_logging_rank:
            try:
                folder.name_latest(found)
            except OSError as error:
                log.warning(
                    "%s cannot be made to name %s, from which this run goes on: %s",
                    found.parent / "latest",
                    found,
                    error,
                )


def _try_to_write(root: Path) -> None:
    try:
        make_folder(root)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise CheckpointError(
            f"checkpoint.dir {root}: cannot be made or written to: {error.strerror or error}"
        ) from None
