"""The checkpoints of a run: where it goes on, and with what; when a save is due, and how each ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from colossus.arithmetic import counted
from colossus.checkpoint import folder
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint, under_key
from colossus.checkpoint.manifest import read_manifest
from colossus.checkpoint.matching import Rename, WeightMatch
from colossus.checkpoint.rank_errors import on_all_ranks
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.weight_sources import Assets, find_weights, open_weights
from colossus.comm.objects import broadcast_object
from colossus.config import ConfigError
from colossus.data.loader import Loader
from colossus.engine.saves import Saves
from colossus.state.state import State

log = logging.getLogger("colossus.engine")

#: gives a checkpoint, but none of those that are known to be damaged
Find = Callable[[dict[Path, CheckpointError]], Path | None]


class Checkpoints(Saves):
    """Saves and loads the whole state of a run. What is not told otherwise is collective: every rank calls.

    `fit` follows the config's section ``checkpoint``. In a loop of your own call `resume` before it and `after_step` in
    it, or `save` and `load` as you like.

    Attributes:
        hooks: whose state belongs to the run; `fit` sets them. In a loop of your own set them before a load.
        resume_from: what `resume` loads: "auto" (the latest of this run), a folder, None; as the config has it.
        is_wanted: a hook wants the next `after_step` to save, whatever ``checkpoint.every`` says: so the state of all
            hooks is that behind what this one has seen.
        is_restart: the launcher has started the ranks again: the newest whole save of this very run is looked for
            first, in the memory of the hosts and on the disk.
        resume_until: of these, later steps than this one are of a branch that the run leaves, and are removed.
        skip_batches: that are left out behind it; None: those up to that of step ``resume_until + 1``.
        rollback_time: when that was decided, in seconds since the epoch; it is saved, so that they are left out once.
        resumed_from: the checkpoint that was loaded, None where none was.
        resumed_plan: the plan it was saved under, in words.
        goes_on: whether that is a checkpoint of this run: one in its folder of checkpoints.
        weights_from: the checkpoint of which weights were loaded, None where none were.
        weights_match: what of it went where.
        stall_seconds: that training has waited for checkpoints so far, since the engine was made.
        on_progress: called from any thread when a part of a checkpoint was written or read: nothing is stuck.
    """

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._has_begun = False
        self.resume_from = self._config.resume
        self.resume_until: int | None = None
        self.skip_batches: int | None = 0
        self.rollback_time = 0.0
        self.resumed_from: Path | None = None
        self.resumed_plan, self.goes_on = "", False
        self.weights_from: Path | None = None
        self.weights_match: WeightMatch | None = None

    @property
    def assets(self) -> Assets:
        """What goes with the weights: a tokenizer, names of classes, ids of special tokens."""
        return self._state.assets

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
        found = self._take_back() if self.is_restart else None
        if wanted is not None and found is None:
            find = folder.find_latest if wanted == "auto" else folder.locate
            path = self.root if wanted == "auto" else Path(wanted)
            with under_key(f"checkpoint.resume = {wanted!r}"):
                found = self._restore_newest(lambda damaged: find(path, damaged))
        if found is None:
            self.take_weights()
        if self.is_restart and self.resume_until is not None:
            self._leave_branch(self.resume_until)
        return found

    def _take_back(self) -> Path | None:
        """Go on with the newest whole save of this run, up to `resume_until`; None where there is none.

        Raises:
            CheckpointError: on all ranks, where there are later ones alone, and there was one before.
            RuntimeError: on all ranks, where one in memory cannot be read to its end, and there is none on the disk.
        """
        until, is_first = self.resume_until, self._run.context.is_logging_rank

        def look() -> tuple[bool, int]:
            """Whether there is anything on the disk, and the step of the newest that is whole."""
            if not self._config.every or not is_first:
                return False, -1
            try:
                found = folder.find_latest(self.root, until=until)
            except DamagedCheckpoint:  # told, or raised, when that is what is left
                return True, -1
            return found is not None, -1 if found is None else read_manifest(found).step

        mine = on_all_ranks(self._world, look, names_ranks=False)
        is_on_disk, step = broadcast_object(mine, self._world, 0)
        found = self._restore_from_memory(step, until, is_all=not is_on_disk)
        if found is None and is_on_disk:
            found = self._restore_newest(lambda damaged: folder.find_latest(self.root, damaged, until))
        if found is None and until is not None and self._config.every:
            on_all_ranks(self._world, lambda: self._require_none_later(until) if is_first else None, names_ranks=False)
        if self._memory is not None:
            self._memory.remove_later(self._run.completed_steps if found is not None else -1)
        return found

    def _require_none_later(self, until: int) -> None:
        """A run that has pruned all it could go back to does not begin anew, and removes nothing."""
        later = [path.name for path, step in folder.named(self.root).items() if step > until]
        if later and until >= self._config.every:
            raise CheckpointError(
                f"{self.root}: the run is to go back behind step {until}, and has only later checkpoints: "
                f"{', '.join(later)}. Nothing is removed; `--resume` goes on from the newest all the same. A larger "
                f"checkpoint.keep_last (now {self._config.keep_last}) keeps older ones"
            )

    def _leave_branch(self, until: int) -> None:
        """What was saved later is of no use any more; batches are left out from here on. Then the run is saved: what
        goes on from here does not see them either.
        """
        run, step = self._run, self._run.completed_steps
        if self._config.every and run.context.is_logging_rank:
            folder.remove_later(self.root, step)
        skipped = until + 1 - step if self.skip_batches is None else self.skip_batches
        if not skipped or run.loaders is None or run.rolled_back == self.rollback_time:
            return
        loader = run.loaders.train
        if not isinstance(loader, Loader):
            raise ConfigError(
                f"train.on_spike: no batches can be left out of a {type(loader).__name__} that was put in the place of "
                f"engine.loaders.train: give the data to colossus.initialize, or set train.on_spike.action=raise"
            )
        loader.set_step(loader.step + skipped)
        run.rolled_back = self.rollback_time
        if run.context.is_logging_rank:
            log.warning("%s behind step %d left out", counted(skipped, "batch", "es"), step)
        if self._config.every:
            self.save(background=False).wait()
            self.finish()

    def _restore_from_memory(self, later_than: int, until: int | None, *, is_all: bool) -> Path | None:
        """What the memory of the hosts has that is newer than the disk.

        Args:
            is_all: the disk has nothing that would be loaded over a half of it.
        """
        memory = self._host_memory()
        reader = memory.newest(later_than, until) if memory is not None else None
        if reader is None:
            return None
        try:
            with torch.inference_mode(False), reader:
                self._state.restore(reader, self.on_progress)
        except CheckpointError as error:  # on all ranks: another host cannot be reached any more, say
            problem = f"the checkpoint in memory {reader.folder.name} cannot be taken: {error}"
            if is_all:  # no CheckpointError: that would end the run, and the next attempt may do better
                raise RuntimeError(
                    f"{problem}; there is none on the disk (checkpoint.every) to take instead"
                ) from error
            if self._run.context.is_logging_rank:
                log.warning("%s", problem)
            return None
        self.resumed_plan = str(reader.manifest.plan.get("text", "another plan"))
        self.resumed_from, self.goes_on, self._has_begun, self._saved_step = reader.folder, True, True, None
        return reader.folder

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
                folder.resume_from(found, self._config.keep_last)
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
            mine = on_all_ranks(self._world, lambda: find(damaged) if is_first else None, names_ranks=False)
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
