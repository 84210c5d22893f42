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
from colossus.checkpoint.together import on_all_ranks
from colossus.checkpoint.writer import CheckpointWriter, Save, SavedCheckpoint
from colossus.comm.objects import all_gather_object
from colossus.data.loader import Loader
from colossus.engine.results import addend
from colossus.state.state import State

log = logging.getLogger("colossus.engine")


class Saves:
    """Of one run.

    Attributes:
        writer: made by the first save.
        stall_seconds: that training has waited.
        is_in_step: a step runs, so that nothing can be saved or loaded.
    """

    def __init__(self, state: State, on_block: Callable[[], None]) -> None:
        self._run, self._state, self._on_block = state.run, state, on_block
        self._config = state.run.config.checkpoint
        # what it means now, whatever the working directory will be
        self._dir = None if self._config.dir is None else str(folder.absolute(self._config.dir))
        self.writer: CheckpointWriter | None = None
        self.stall_seconds = 0.0
        self.is_in_step = False
        self._save: Save | None = None
        #: steps of the last save that was begun (the same on all ranks), and of the checkpoint that has the state as is
        self._begun_step: int | None = None
        self._saved_step: int | None = None
        self._ended: list[SavedCheckpoint] = []
        #: kept for all ranks to raise
        self._failed: CheckpointError | None = None
        self._has_asked_to_stop = False
        self._is_root_known = False
        #: the checkpoint in this run's own folder that it goes on from, until `latest` names it
        self._origin: Path | None = None

    @property
    def has_root(self) -> bool:
        return self._config.dir is not None or self._run.folder is not None

    @property
    def root(self) -> Path:
        if not self.has_root:
            raise ValueError("checkpoint.dir: name a folder for checkpoints; only `colossus launch` has a run folder")
        return folder.root_of(self._dir, self._run.folder or Path())

    def require_root(self) -> None:
        """Where checkpoints are due, find now that they have nowhere to go, and not at the first save. Collective.

        Raises:
            ValueError: without a folder, on all ranks.
            CheckpointError: on all ranks, where rank 0 cannot write to it.
        """
        if self._config.every and not self._is_root_known:
            root = self.root
            world = self._run.context.group(self._run.context.grid.names)
            on_all_ranks(
                world, lambda: _try_to_write(root) if self._run.context.is_logging_rank else None, tells_ranks=False
            )
            self._is_root_known = True

    def save(self, *, background: bool) -> Save:
        self.require_between_steps("saved")
        self._run.strategy.sync_point()
        if self._save is not None:
            self._settle()
        began = time.perf_counter()
        self.name_latest()
        context, step = self._run.context, self._run.completed_steps
        if self.writer is None:
            self.writer = CheckpointWriter(
                self.root,
                context,
                keep_last=self._config.keep_last,
                keep_every=self._config.keep_every,
                on_block=self._on_block,
            )
        with torch.inference_mode(False):  # the memory for copies is kept
            save = self.writer.save(self._state.collect, self._state.about(), background=background)
        self._save, self._begun_step, self._saved_step = save, step, step
        self.stall_seconds += time.perf_counter() - began
        return save

    def after_step(self, *, is_last: bool) -> list[SavedCheckpoint]:
        if not self._config.every:
            return []
        self.require_root()
        self.name_latest()
        stops = self._config.on_error == "stop"
        is_due = is_last or self._run.completed_steps % self._config.every == 0
        if self._save is not None and (is_due or self._save.is_done):
            self._settle(is_raised=is_due and stops)
        if is_due:
            self._run.strategy.sync_point()
            if stops:
                self._raise_failed()
            if not self._is_saved():
                self.save(background=self._config.background and not is_last)
                if is_last or not self._config.background:
                    self._settle(is_raised=is_last or stops)
            if is_last or stops:
                self._raise_failed()
        ended, self._ended = self._ended, []
        return ended

    def _is_saved(self) -> bool:
        """Whether there is a checkpoint of the state as it is: for all ranks, or for none. One rank alone may have seen
        its save fail, when it did not hear how it ended."""
        step, context = self._run.completed_steps, self._run.context
        if self._begun_step != step:
            return False
        return all(all_gather_object(self._saved_step == step, context.group(context.grid.names)))

    def _settle(self, *, is_raised: bool = False) -> None:
        """Wait for the end of the save under way. One that failed is told in the log, unless its caller knows.

        Args:
            is_raised: all ranks raise next what went wrong on any.
        """
        save, self._save = self._save, None
        assert save is not None
        began = time.perf_counter()
        save.ended()
        self.stall_seconds += time.perf_counter() - began
        untold = save.untold()
        try:
            self._ended.append(save.wait())
        except CheckpointError as error:
            self._saved_step = None
            stops = self._config.on_error == "stop"
            if untold is None:
                return
            if is_raised or stops:
                self._failed = error
            if is_raised:
                return
            if stops:  # ranks hear of it at different steps: they raise it at the next one that is due
                self._run.stop = addend(True, None)
                self._has_asked_to_stop = True
            if self._run.context.is_logging_rank:
                log.error("%s; training %s", error, "stops" if stops else "goes on")

    def _raise_failed(self) -> None:
        """What went wrong on any rank, on all of them. It is over then: the next save that is due is tried."""
        context = self._run.context
        failed, self._failed = self._failed, None

        def work() -> None:
            if failed is not None:
                raise failed

        try:
            on_all_ranks(context.group(context.grid.names), work, tells_ranks=False)
        except CheckpointError:
            self._saved_step = None
            if self._has_asked_to_stop:  # whoever catches this goes on
                self._run.stop = 0.0
                self._has_asked_to_stop = False
            raise

    def finish(self, patience: float | None = None) -> None:
        if self.writer is not None:
            self.writer.finish(patience)
        if self._save is not None:
            save, self._save = self._save, None
            try:
                self._ended.append(save.wait())
            except CheckpointError as error:  # which the writer has told
                self._saved_step = None
                if self._config.on_error == "stop":
                    self._failed = error

    def close(self) -> None:
        self.finish()
        if self.writer is not None:
            self.writer.close()
            self.writer = None

    # -- steps and loads ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def during_step(self) -> Iterator[None]:
        """Around a train step."""
        if self._run.strategy.is_averaged:
            raise RuntimeError(
                "a step cannot be trained inside of strategy.evaluation() or export(): the parameters are the average "
                "of the replicas there, and the replica's own come back at its end; leave that block first"
            )
        self.name_latest()
        self._state.hook_states.forget_untaken()
        self.is_in_step = True
        try:
            yield
        finally:
            self.is_in_step = False
            loaders = self._run.loaders
            if loaders is not None and isinstance(loaders.train, Loader):
                loaders.train.num_untrained = 0

    def require_between_steps(self, what: str) -> None:
        if self.is_in_step:
            raise CheckpointError(
                f"a checkpoint cannot be {what} inside of a train step: weights, optimizer and place in the data are "
                f"of different steps there; do it after engine.train_step, or in a hook's on_step_end"
            )
        if self._run.strategy.is_averaged:
            raise CheckpointError(
                f"a checkpoint cannot be {what} inside of strategy.evaluation() or export(): the parameters are the "
                f"average of the replicas there, not each replica's own; leave that block first"
            )

    def goes_on_from(self, found: Path) -> None:
        """All state is that of a checkpoint now."""
        is_own = self.has_root and found.parent.resolve() == self.root.resolve()
        self._begun_step = self._saved_step = self._run.completed_steps if is_own else None
        self._origin = found if is_own and self._config.every else None

    def is_changed(self) -> None:
        """The state may be that of no checkpoint now."""
        self._begun_step = self._saved_step = None

    def name_latest(self) -> None:
        """Training goes on: let ``latest`` name the checkpoint it goes on from, which may be an older one."""
        origin, self._origin = self._origin, None
        if origin is None or not self._run.context.is_logging_rank:
            return
        try:
            folder.name_latest(origin)
        except OSError as error:
            log.warning(
                "%s cannot be made to name %s, from which this run goes on: %s", origin.parent / "latest", origin, error
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
