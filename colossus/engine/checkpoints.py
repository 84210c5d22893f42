"""The checkpoints of a run: where it goes on, and with what; `save_schedule` saves them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from colossus.checkpoint import folder
from colossus.checkpoint.assets import Assets
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint, under_key
from colossus.checkpoint.matching import Rename, WeightMatch
from colossus.checkpoint.rank_errors import on_all_ranks
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.sources import find_weights, open_weights
from colossus.checkpoint.writer import Save
from colossus.comm.objects import broadcast_object
from colossus.engine.save_schedule import SaveSchedule
from colossus.state.run_values import SavedHook
from colossus.state.state import State

log = logging.getLogger("colossus.engine")

#: gives a checkpoint, but none of those that are known to be damaged
Find = Callable[[dict[Path, CheckpointError]], Path | None]


class Checkpoints(SaveSchedule):
    """Saves and loads the whole state of a run. What is not told otherwise is collective: every rank calls.

    `fit` follows the config's section ``checkpoint``. In a loop of your own call `resume` before it and `after_step` in
    it, or `save` and `load` as you like.

    Attributes:
        hooks: whose state belongs to the run; `fit` sets them. In a loop of your own set them before a load.
        resume_from: what `resume` loads: "auto" (the latest of this run), a folder, None; as the config has it.
        resumed_from: the checkpoint that was loaded, None where none was.
        resumed_plan: the plan it was saved under, in words.
        weights_from: the checkpoint of which weights were loaded, None where none were.
        weights_match: what of it went where.
    """

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._has_begun = self._config.weights is None
        self.resume_from = self._config.resume
        self.resumed_from: Path | None = None
        self.resumed_plan = ""
        self.weights_from: Path | None = None
        self.weights_match: WeightMatch | None = None

    @property
    def hooks(self) -> Sequence[SavedHook]:
        return self._state.hooks

    @hooks.setter
    def hooks(self, hooks: Sequence[SavedHook]) -> None:
        self._state.hooks = hooks

    @property
    def assets(self) -> Assets:
        """What lies beside the weights in a checkpoint, on the first rank: tokenizer, ids of special tokens, .."""
        return self._state.assets

    def save(self, *, background: bool | None = None) -> Save:
        self.require_begun()
        return super().save(background=background)

    def begin(self) -> None:
        """Take the weights that ``checkpoint.weights`` names, unless the run may go on somewhere: what a checkpoint has
        takes their place, and `resume` looks for it first. `colossus.initialize` calls this.

        Raises:
            CheckpointError: on all ranks, when they are not whole, or not of this model.
        """
        if self.resume_from is None:
            self._take_weights()

    def require_begun(self) -> None:
        """That weights which the config names have been looked at before something is made of others.

        Raises:
            CheckpointError: they are not, since `resume` comes first.
        """
        if not self._has_begun:
            assert self._config.weights is not None
            raise CheckpointError(
                f"checkpoint.weights = {self._config.weights.path!r}: not loaded yet, since with checkpoint.resume = "
                f"{self.resume_from!r} the run may go on from a checkpoint instead: call engine.checkpoints.resume() "
                f"before the first step, or leave checkpoint.resume out"
            )

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
        self._require_root()
        if self.resumed_from is not None:
            return None
        found = None
        if wanted is not None:
            find = folder.find_latest if wanted == "auto" else folder.locate
            path = self.root if wanted == "auto" else Path(wanted)
            with under_key(f"checkpoint.resume = {wanted!r}"):
                found = self._restore_newest(lambda damaged: find(path, damaged))
        if found is None:
            self._take_weights()
        return found

    def _take_weights(self) -> None:
        """Those that the config names, into a run that begins and has none."""
        weights = self._config.weights
        if weights is not None and self.weights_from is None and not self._run.completed_steps:
            with under_key("checkpoint.weights"):
                self.load_weights(
                    weights.path, only=weights.only, rename=weights.rename, strict=weights.strict, grow=weights.grow
                )
        self._has_begun = True

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

        Returns:
            What was loaded from where, what was missing, left over, of another shape: the same on all ranks.

        Raises:
            CheckpointError: on all ranks, before anything is changed: it is not whole, it does not fit, a pattern or a
                rename meets nothing, or nothing fits.
        """
        for title, patterns in (("only", only), ("grow", grow)):
            if isinstance(patterns, str):
                raise ValueError(f"load_weights: {title} takes a list of patterns: {title}=[{patterns!r}]")

        def take(reader: CheckpointReader) -> None:
            self.weights_match = self._state.load_weights(
                reader, only=only, rename=rename, strict=strict, grow=grow, on_progress=self.on_progress
            )

        self.weights_from = self._read_newest(lambda damaged: find_weights(path, damaged), take)
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
            self._goes_on_from(found)
        return found

    def _read_newest(self, find: Find, take: Callable[[CheckpointReader], None]) -> Path | None:
        """Read what rank 0 finds; if a checksum then shows that it is damaged, what it finds without that."""
        self._require_between_steps("loaded")
        self._run.strategy.sync_point()
        self.finish()
        self._saved_step = None
        world = self._run.context.group(self._run.context.grid.names)
        damaged: dict[Path, CheckpointError] = {}
        is_first = self._run.context.is_logging_rank
        while True:
            mine = on_all_ranks(world, lambda: find(damaged) if is_first else None, tells_ranks=False)
            found = broadcast_object(mine, world, 0)
            if found is None:
                return None
            try:
                # what inference mode makes, nothing could train
                with torch.inference_mode(False), on_all_ranks(world, partial(open_weights, found)) as reader:
                    take(reader)
            except DamagedCheckpoint as error:
                damaged[found] = error
                if is_first:
                    log.warning("%s", error)
            else:
                self._has_begun = True
                return found
