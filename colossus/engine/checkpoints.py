"""The checkpoints of a run: where it goes on, and with what; when a save is due, and how each ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from colossus.checkpoint import folder
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint, under_key
from colossus.checkpoint.matching import Rename, WeightMatch
from colossus.checkpoint.rank_errors import on_all_ranks
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.weight_sources import Assets, find_weights, open_weights
from colossus.checkpoint.writer import CheckpointWriter, Save, SavedCheckpoint
from colossus.comm.objects import broadcast_object
from colossus.state.run_values import SavedHook
from colossus.state.state import State

log = logging.getLogger("colossus.engine")

#: gives a checkpoint, but none of those that are known to be damaged
Find = Callable[[dict[Path, CheckpointError]], Path | None]


class Checkpoints:
    """Saves and loads the whole state of a run. What is not told otherwise is collective: every rank calls.

    `fit` follows the config's section ``checkpoint``. In a loop of your own call `resume` before it and `after_step` in
    it, or `save` and `load` as you like.

    Attributes:
        hooks: whose state belongs to the run; `fit` sets them. In a loop of your own set them before a load.
        resume_from: what `resume` loads: "auto" (the latest of this run), a folder, None; as the config has it.
        resumed_from: the checkpoint that was loaded, None where none was.
        resumed_plan: the plan it was saved under, in words.
        goes_on: whether that is a checkpoint of this run: one in its folder of checkpoints.
        weights_from: the checkpoint of which weights were loaded, None where none were.
        weights_match: what of it went where.
        stall_seconds: that training has waited for checkpoints so far, since the engine was made.
        on_progress: called from any thread when a part of a checkpoint was written or read: nothing is stuck.
    """

    def __init__(self, state: State) -> None:
        self._run, self._state, self._config = state.run, state, state.run.config.checkpoint
        self._world = self._run.context.group(self._run.context.grid.names)
        self._dir = None if self._config.dir is None else str(folder.absolute(self._config.dir))
        self._has_begun = False
        self.resume_from = self._config.resume
        self.resumed_from: Path | None = None
        self.resumed_plan, self.goes_on = "", False
        self.weights_from: Path | None = None
        self.weights_match: WeightMatch | None = None
        self.on_progress: Callable[[], None] = lambda: None
        self.stall_seconds = 0.0
        self._writer: CheckpointWriter | None = None
        self._save: Save | None = None
        self._ended: list[SavedCheckpoint] = []
        #: steps done when the last checkpoint was begun; None where none has the state as it is
        self._saved_step: int | None = None

    @property
    def assets(self) -> Assets:
        """What goes with the weights: a tokenizer, names of classes, ids of special tokens."""
        return self._state.assets

    @property
    def hooks(self) -> Sequence[SavedHook]:
        return self._state.hooks

    @hooks.setter
    def hooks(self, hooks: Sequence[SavedHook]) -> None:
        self._state.hooks = hooks

    @property
    def root(self) -> Path:
        """The folder of this run's checkpoints; a ValueError outside of a launch, where the config does not name it."""
        if self._dir is None and self._run.folder is None:
            raise ValueError("checkpoint.dir: name a folder for checkpoints; only `colossus launch` has a run folder")
        return folder.root_of(self._dir, self._run.folder or Path())

    # -- saves --------------------------------------------------------------------------------------------

    def save(self, *, background: bool | None = None) -> Save:
        """Start to save the state as it is now, between two steps; waits for the end of the save before.

        In a loop over ``engine.loader`` call it after `train_step`: a batch that was taken and not trained on yet comes
        again when the run goes on only where the order of the data follows from the step; else a warning says so.

        Args:
            background: whether the step waits for a copy in memory only; by default as the config has it.

        Returns:
            What can be waited for; it raises there what went wrong.
        """
        self.take_weights()
        self._require_own_parameters()
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
        """Save if ``checkpoint.every`` says so; tell which saves, also of `save`, have ended since the last call.

        A save that fails is an error in the log of rank 0, and the next one is tried.

        Args:
            is_last: no step follows: save what is not saved yet, and wait until it is.

        Raises:
            CheckpointError: on all ranks, when the save after the last step failed.
        """
        step = self._run.completed_steps
        is_due = bool(self._config.every) and (is_last or step % self._config.every == 0)
        if self._save is not None and (is_last or self._save.is_done or (is_due and self._saved_step != step)):
            self.finish()
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

    def finish(self) -> None:
        """Wait for the end of the save under way. If it failed, and nobody was told, rank 0 says so in the log."""
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

    def _require_own_parameters(self) -> None:
        if self._run.strategy.is_averaged:
            raise CheckpointError(
                "no checkpoint can be saved or loaded inside of averaged(), strategy.evaluation() or export(), where "
                "parameters are an average: leave that block first"
            )

    # -- loads --------------------------------------------------------------------------------------------

    def take_weights(self) -> None:
        """Take the weights that ``checkpoint.weights`` names into a run that begins, once.

        `colossus.initialize` calls this, unless the run may go on from a checkpoint: `resume` looks for that first. The
        first step does at the latest.

        Raises:
            CheckpointError: on all ranks, when they are not whole, or not of this model.
        """
        weights, is_taken = self._config.weights, self._has_begun
        self._has_begun = True
        if weights is not None and not is_taken:
            with under_key("checkpoint.weights"):
                self.load_weights(
                    weights.path, only=weights.only, rename=weights.rename, strict=weights.strict, grow=weights.grow,
                    average=weights.average,
                )  # fmt: skip

    def resume(self) -> Path | None:
        """Go on where `resume_from` says, once; where that is nowhere, a run that begins takes the weights
        that ``checkpoint.weights`` names, unless it has them.

        Where it names no single checkpoint and the newest is damaged, the newest that is whole is loaded, after a
        warning that says what was wrong.

        Returns:
            The checkpoint behind which the run goes on.

        Raises:
            CheckpointError: on all ranks, when it is no whole checkpoint of this model.
        """
        wanted = self.resume_from
        if self._config.every:
            _ = self.root  # that there is one is found now, and not at the first save
        if self.resumed_from is not None:
            return None
        found = None
        if wanted is not None:
            find = folder.find_latest if wanted == "auto" else folder.locate
            path = self.root if wanted == "auto" else Path(wanted)
            with under_key(f"checkpoint.resume = {wanted!r}"):
                found = self._restore_newest(lambda damaged: find(path, damaged))
        if found is None:
            self.take_weights()
        return found

    def load(self, path: Path | str) -> None:
        """Take the whole state of a checkpoint: the run goes on behind its step, under any plan.

        Under the plan of the checkpoint the run is bit for bit the one that was saved. Under another all parameters and
        their state are the same to the bit, and what belonged to single ranks (random generators, places in a loader of
        one's own, buffers that differ between ranks) is that of the first, or begins anew.
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
        average: str | None = None,
    ) -> WeightMatch:
        """Take parameters and buffers of a checkpoint, no optimizer and no step: where fine-tuning begins.

        The optimizer's state stays as it is. Under any plan, whatever the plan of the checkpoint. Names are those of
        the whole model; query, key and value are apart; a tied parameter is found under any of its names.

        Args:
            path: as of `load`; or a model folder of Hugging Face, whose tensors have our names then.
            only: patterns (`fnmatch`) of names in this model, ``["blocks.*"]``; what none meets keeps its values.
            rename: names of the checkpoint to names in this model, a function or a dict (`matching.renamed`).
            strict: refuse when something asked for is not in the checkpoint, when the checkpoint has something that
                the model has not, or another shape of it; False loads what fits, and says what did not.
            grow: patterns of names in this model that may have more rows (dim 0) than were saved, for a larger
                vocabulary or more positions: the saved rows are loaded, the others keep their initial values. Of
                learned positions a model with a smaller ``seq_len`` takes the first rows, without being told.
            average: of the weights that a hook of the run has kept, "ema" or "swa", in the place of the parameters.

        Returns:
            What was loaded from where, what was missing, left over, of another shape: the same on all ranks.

        Raises:
            CheckpointError: on all ranks, before anything is changed: it is not whole, it does not fit, a pattern or a
                rename meets nothing, or nothing fits.
        """
        if isinstance(only, str) or isinstance(grow, str):
            raise ValueError("load_weights: only and grow take lists of patterns: only=['blocks.*']")

        def take(reader: CheckpointReader) -> None:
            self.weights_match = self._state.load_weights(
                reader, only=only, rename=rename, strict=strict, grow=grow, on_progress=self.on_progress
            )

        self.weights_from = self._read_newest(lambda damaged: find_weights(path, damaged), take, average)
        assert self.weights_match is not None
        if not self.weights_match.is_complete and self._run.context.is_logging_rank:
            log.warning("not loaded from %s: %s", self.weights_from, self.weights_match)
        return self.weights_match

    def _restore_newest(self, find: Find) -> Path | None:
        def take(reader: CheckpointReader) -> None:
            self._state.restore(reader, self.on_progress)
            self.resumed_plan = str(reader.manifest.plan.get("text", "another plan"))

        found = self._read_newest(find, take)
        if found is not None:
            self.resumed_from = found
            self.weights_from = self.weights_match = None
            has_root = self._dir is not None or self._run.folder is not None
            self.goes_on = has_root and found.parent.resolve() == self.root.resolve()
            self._saved_step = self._run.completed_steps if self.goes_on else None
            if self.goes_on and self._config.every and self._run.context.is_logging_rank:
                # perhaps an older one: a run that is killed before its next save goes on with this branch
                folder.name_latest(found)
        return found

    def _read_newest(
        self, find: Find, take: Callable[[CheckpointReader], None], average: str | None = None
    ) -> Path | None:
        """Read what rank 0 finds; if a checksum shows that it is damaged, what it finds without that."""
        self._require_own_parameters()
        self._run.strategy.sync_point()
        self.finish()
        self._saved_step = None
        damaged: dict[Path, CheckpointError] = {}
        is_first = self._run.context.is_logging_rank
        while True:
            mine = on_all_ranks(self._world, lambda: find(damaged) if is_first else None, tells_ranks=False)
            found = broadcast_object(mine, self._world, 0)
            if found is None:
                return None
            try:
                # what inference mode makes, nothing could train
                opens = partial(open_weights, found, average)
                with torch.inference_mode(False), on_all_ranks(self._world, opens) as reader:
                    take(reader)
            except DamagedCheckpoint as error:
                damaged[found] = error
                if is_first:
                    log.warning("%s", error)
            else:
                self._has_begun = True
                return found
