"""The checkpoints of a run: when they are saved, what a save that fails does, where a run goes on."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from colossus.checkpoint import folder
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.checkpoint.matching import Rename, WeightMatch
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.together import on_all_ranks
from colossus.checkpoint.writer import CheckpointWriter, Save, SavedCheckpoint
from colossus.comm.objects import broadcast_object
from colossus.engine.hooks import Hook
from colossus.engine.state.engine_state import EngineState

if TYPE_CHECKING:
    from colossus.engine.engine import Engine

log = logging.getLogger("colossus.engine")

#: gives a checkpoint, but none of those that are known to be damaged
Find = Callable[[dict[Path, CheckpointError]], Path | None]


class Checkpoints:
    """Saves and loads the whole state of an engine. What is not told otherwise is collective: every rank calls.

    `fit` follows the config's section ``checkpoint``. In a loop of your own call `resume` before it and `after_step` in
    it, or `save` and `load` as you like.

    Attributes:
        hooks: whose state belongs to the run; `fit` sets them.
        resume_from: what `resume` loads: "auto" (the latest of this run), a folder, None; as the config has it.
        resumed_from: the checkpoint that was loaded, None where none was.
        resumed_plan: the plan it was saved under, in words.
        stall_seconds: that training has waited for checkpoints so far, since the engine was made.
        weights_from: the checkpoint of which weights were loaded, None where none were.
        weights_match: what of it went where.
        on_progress: called from any thread when a part of a checkpoint was written or read: nothing is stuck.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._config = engine, engine.config.checkpoint
        self._dir = None if self._config.dir is None else str(folder.absolute(self._config.dir))
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
        self.weights_from: Path | None = None
        self.weights_match: WeightMatch | None = None
        self.on_progress: Callable[[], None] = lambda: None

    @property
    def hooks(self) -> Sequence[Hook]:
        return self._state.hooks

    @hooks.setter
    def hooks(self, hooks: Sequence[Hook]) -> None:
        self._state.hooks = list(hooks)

    @property
    def root(self) -> Path:
        """The folder of this run's checkpoints; a ValueError outside of a launch, where the config does not name it."""
        if not self._has_root:
            raise ValueError("checkpoint.dir: name a folder for checkpoints; only `colossus launch` has a run folder")
        return folder.root_of(self._dir, self._engine.run_dir or Path())

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
        """Save if ``checkpoint.every`` says so; tell which saves have ended since the last call.

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

    def finish(self, patience: float | None = None) -> None:
        """Wait for the end of the save under way. If it failed, and nobody was told, rank 0 says so in the log.

        Args:
            patience: seconds after which a silent rank is given up; by default ``comm.timeout_seconds``.
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
        """Go on where `resume_from` says, once; where that is nowhere, a run that begins takes the weights
        that ``checkpoint.weights`` names.

        Where it names no single checkpoint and the newest is damaged, the newest that is whole is loaded, after a
        warning that says what was wrong.

        Returns:
            The checkpoint behind which the run goes on.

        Raises:
            CheckpointError: on all ranks, when it is no whole checkpoint of this model.
        """
        wanted, weights = self.resume_from, self._config.weights
        if self.resumed_from is not None or self.weights_from is not None:
            return None
        found = None
        if wanted is not None:
            find = folder.find_latest if wanted == "auto" else folder.locate
            path = self.root if wanted == "auto" else Path(wanted)
            with _named(f"checkpoint.resume = {wanted!r}"):
                found = self._restore_newest(lambda damaged: find(path, damaged))
        if found is None and weights is not None and not self._engine.completed_steps:
            with _named("checkpoint.weights"):
                self.load_weights(
                    weights.path, only=weights.only, rename=weights.rename, strict=weights.strict, grow=weights.grow
                )
        return found

    def load(self, path: Path | str) -> None:
        """Take the whole state of a checkpoint: the run goes on behind its step, under any plan.

        Under the plan of the checkpoint the run is bit for bit the one that was saved. Under another all parameters and
        their state are the same to the bit, and what belonged to single ranks (random generators, places in a loader of
        one's own, buffers, modules and hooks that differ between ranks) goes on as `engine/state/` says of each.
        What the config changes is done: more steps, another precision, lr or weight decay, another order of the data
        (warnings, by one rank). The optimizer must be of the same class.

        Args:
            path: a checkpoint; or a folder of them, or a run folder, whose newest whole one is taken.

        Raises:
            CheckpointError: on all ranks, before anything is changed, when it is no whole checkpoint of this model.
        """
        self._restore_newest(lambda damaged: folder.locate(Path(path), damaged))

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

        The optimizer's state stays as it is. Under any plan, whatever the plan of the checkpoint. Names are those of
        the whole model; query, key and value are apart; a tied parameter is found under any of its names.

        Args:
            path: as of `load`.
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
        matched: list[WeightMatch] = []

        def take(reader: CheckpointReader) -> None:
            matched.append(
                self._state.load_weights(
                    reader, only=only, rename=rename, strict=strict, grow=grow, on_progress=self.on_progress
                )
            )

        self.weights_from = self._read_newest(lambda damaged: folder.locate(Path(path), damaged), take)
        (self.weights_match,) = matched
        if not self.weights_match.is_complete and self._engine.context.is_logging_rank:
            log.warning("not loaded from %s: %s", self.weights_from, self.weights_match)
        return self.weights_match

    def _restore_newest(self, find: Find) -> Path | None:
        def take(reader: CheckpointReader) -> None:
            self._state.restore(reader, self.on_progress)
            self.resumed_plan = str(reader.manifest.plan.get("text", "another plan"))

        found = self._read_newest(find, take)
        if found is not None:
            self.resumed_from = found
            is_own = self._has_root and found.parent.resolve() == self.root.resolve()
            self._last_step = self._engine.completed_steps if is_own else None
        return found

    def _read_newest(self, find: Find, take: Callable[[CheckpointReader], None]) -> Path | None:
        """Read what rank 0 finds; if a checksum then shows that it is damaged, what it finds without that."""
        world = self._engine.context.group(self._engine.context.grid.names)
        damaged: dict[Path, CheckpointError] = {}
        is_first = self._engine.context.is_logging_rank
        while True:
            mine = on_all_ranks(world, lambda: find(damaged) if is_first else None, tells_ranks=False)
            found = broadcast_object(mine, world, 0)
            if found is None:
                return None
            try:
                with on_all_ranks(world, partial(CheckpointReader, found)) as reader:
                    take(reader)
            except DamagedCheckpoint as error:
                damaged[found] = error
                if is_first:
                    log.warning("%s", error)
            else:
                return found

    @property
    def _has_root(self) -> bool:
        return self._config.dir is not None or self._engine.run_dir is not None


@contextlib.contextmanager
def _named(title: str) -> Iterator[None]:
    """Errors begin with the key that led to them."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{title}: {error}") from error
