"""The checkpoints of a run: when they are saved, what a save that fails does, where a run goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from colossus.checkpoint import folder
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.checkpoint.matching import Rename, WeightMatch
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.together import on_all_ranks
from colossus.checkpoint.writer import CheckpointWriter, Save, SavedCheckpoint
from colossus.comm.objects import broadcast_object
from colossus.context.groups import AxisGroup
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
        resumed_from: the checkpoint that was loaded, None where none was.
        weights_from: the checkpoint of which weights were loaded, None where none were.
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
        self.resumed_from: Path | None = None
        self.weights_from: Path | None = None
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
        if self._config.dir is not None:
            return Path(self._config.dir)
        if self._engine.run_dir is None:
            raise ValueError("checkpoint.dir: name a folder for checkpoints; only `colossus launch` has a run folder")
        return self._engine.run_dir / "checkpoints"

    # -- saving -------------------------------------------------------------------------------------------

    def save(self, *, background: bool | None = None) -> Save:
        """Start to save the state as it is now; waits for the end of the save before.

        Args:
            background: whether the step waits for a copy in memory only; by default as the config has it.

        Returns:
            What can be waited for; it raises there what went wrong.
        """
        background = self._config.background if background is None else background
        if self._writer is None:
            self._writer = CheckpointWriter(
                self.root,
                self._engine.context,
                keep_last=self._config.keep_last,
                keep_every=self._config.keep_every,
                on_block=lambda: self.on_progress(),
            )
        return self._writer.save(self._state.collect, self._state.about(), background=background)

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
        try:
            return [save.wait()]
        except CheckpointError as error:
            self._last_step = None
            if self._config.on_error == "stop" or is_last:  # nothing is left to go on with
                self._failed = error
            elif self._engine.context.is_logging_rank:
                log.error("%s; training goes on", error)
        return []

    def finish(self, patience: float | None = None) -> None:
        """Wait for the end of the save under way. If it failed, and nobody was told, rank 0 says so in the log.

        Args:
            patience: seconds after which a rank that gives no sign of life is given up; by default the config's
                ``comm.timeout_seconds``.
        """
        if self._writer is not None:
            self._writer.finish(patience)

    def close(self) -> None:
        """`finish`, and let go of the folder."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    # -- loading ------------------------------------------------------------------------------------------

    def resume(self) -> Path | None:
        """Go on where ``checkpoint.resume`` says, once; where that is nowhere, a run that begins takes the weights
        that ``checkpoint.weights`` names.

        Returns:
            The checkpoint behind which the run goes on.

        Raises:
            CheckpointError: on all ranks, when it is no whole checkpoint of this model.
        """
        wanted, weights = self._config.resume, self._config.weights
        if self.resumed_from is not None or self.weights_from is not None:
            return None
        found = self._load_newest(wanted, "checkpoint.resume") if wanted is not None else None
        if found is None and weights is not None and not self._engine.completed_steps:
            self.load_weights(
                weights.path, only=weights.only, rename=weights.rename, strict=weights.strict, grow=weights.grow
            )
        return found

    def load(self, path: Path | str) -> None:
        """Take the whole state of a checkpoint: the run goes on behind its step, under any plan.

        Args:
            path: a checkpoint; or a folder of them, or a run folder, of which the newest whole one is taken.

        Raises:
            CheckpointError: on all ranks, before anything is changed, when it is no whole checkpoint of this model.
        """
        self._load_newest(str(path), "load")

    def _load_newest(self, wanted: str, title: str) -> Path | None:
        """Load what is meant; if a checksum shows that it is damaged and it was one of several, the next one."""
        damaged: dict[Path, CheckpointError] = {}
        while (found := self._find(wanted, title, damaged)) is not None:
            try:
                self._load(found)
            except DamagedCheckpoint as error:
                damaged[found] = error
                if self._engine.context.is_logging_rank:
                    log.warning("%s", error)
            else:
                break
        return found

    def _load(self, found: Path) -> None:
        with self._open(found) as reader:
            self._state.restore(reader, self.on_progress)
        self.resumed_from = found
        is_own = found.parent.resolve() == self.root.resolve() if self._has_root else False
        self._last_step = self._engine.completed_steps if is_own else None

    def load_weights(
        self,
        path: Path | str,
        *,
        only: Sequence[str] | None = None,
        rename: Rename | None = None,
        strict: bool = True,
        grow: Sequence[str] = (),
    ) -> WeightMatch:
        """Take parameters and buffers of a checkpoint, no optimizer and no step: where fine-tuning begins.

        Under any plan, whatever the plan of the checkpoint. Names are those of the whole model; query, key and value
        are apart; a tied parameter is found under any of its names.

        Args:
            path: a checkpoint, a folder of them or a run folder.
            only: patterns (`fnmatch`) of names in this model, ``["blocks.*"]``; what none meets keeps its values.
            rename: names of the checkpoint to names in this model, a function or a dict (`matching.renamed`).
            strict: refuse when something asked for is not in the checkpoint, when the checkpoint has something that
                the model has not, or another shape of it; False loads what fits, and says what did not.
            grow: patterns of names in this model that may have more rows (dim 0) than were saved, for a larger
                vocabulary or more positions: the saved rows are loaded, the others keep their initial values.

        Returns:
            What was loaded from where, what was missing, left over, of another shape: the same on all ranks.

        Raises:
            CheckpointError: on all ranks, before anything is changed: it is not whole, it does not fit, a pattern or a
                rename meets nothing, or nothing fits.
        """
        for title, patterns in (("only", only), ("grow", grow)):
            if isinstance(patterns, str):
                raise ValueError(f"load_weights: {title} takes a list of patterns: {title}=[{patterns!r}]")
        found = self._find(str(path), "load_weights")
        assert found is not None
        with self._open(found) as reader:
            match = self._state.load_weights(
                reader, only=only, rename=rename, strict=strict, grow=grow, on_progress=self.on_progress
            )
        self.weights_from = found
        if self._engine.context.is_logging_rank:
            self._tell_weights(found, match)
        return match

    def _tell_weights(self, found: Path, match: WeightMatch) -> None:
        log.info("%d parameters and buffers loaded from %s", len(match.sources), found)
        for name, (saved, here) in match.grown.items():
            log.info("%s has %d rows, %d of them loaded; the others keep their initial values", name, here, saved)
        if not match.is_complete:
            log.warning("not loaded from %s: %s", found, match)

    def _find(self, wanted: str, title: str, damaged: dict[Path, CheckpointError] | None = None) -> Path | None:
        """The checkpoint that is meant, as the logging rank sees it; "auto": the latest of this run, if any."""

        def find() -> Path | None:
            if not self._engine.context.is_logging_rank:
                return None
            try:
                if wanted == "auto":
                    return folder.find_latest(self.root, damaged)
                return folder.locate(Path(wanted), damaged)
            except CheckpointError as error:
                raise CheckpointError(f"{title} = {wanted!r}: {error}") from None

        return broadcast_object(on_all_ranks(self._world, find, tells_ranks=False), self._world, 0)

    def _open(self, found: Path) -> CheckpointReader:
        """Open a checkpoint on all ranks, or on none."""
        return on_all_ranks(self._world, lambda: CheckpointReader(found))

    @property
    def _world(self) -> AxisGroup:
        context = self._engine.context
        return context.group(context.grid.names)

    @property
    def _has_root(self) -> bool:
        return self._config.dir is not None or self._engine.run_dir is not None
