"""The checkpoints of a run: the one from which it resumes, loading and saving."""

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
from colossus.engine.launched import Launched
from colossus.engine.saves import Saves
from colossus.state.state import State

log = logging.getLogger("colossus.engine")

#: returns a checkpoint that is not among the damaged ones
Find = Callable[[dict[Path, CheckpointError]], Path | None]


class Checkpoints(Saves):
    """The calls that save and load the whole state of a run. They are collective, if they do not say otherwise.

    `fit` follows the config's section ``checkpoint``. In a loop of your own call `resume` before it and `after_step` in
    it, or `save` and `load`.

    Attributes:
        hooks: hooks whose state belongs to the run; `fit` sets them. In a loop of your own set them before a load.
        resume_from: what `resume` loads: "auto" (the latest of this run), a folder, or None; by default that of the
            config.
        is_restart, resume_until, skip_batches, rollback_time: a launcher's decision; see `Launched`.
        resumed_from: the checkpoint that was loaded, or None.
        resumed_plan: the plan it was saved under, as text.
        is_same_run: whether that is a checkpoint in this run's folder of checkpoints.
        weights_from: the checkpoint whose weights were loaded, or None.
        weights_match: the match of its tensors to the model's.
        stall_seconds: time that training has waited for checkpoints, since the engine was made.
        on_progress: called from any thread when a part of a checkpoint was written or read, as a sign of life.
    """

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._has_begun = False
        self.resume_from = self._config.resume
        self.resume_until: int | None = None
        self.skip_batches: int | None = 0
        self.rollback_time = 0.0
        self.resumed_from: Path | None = None
        self.resumed_plan, self.is_same_run = "", False
        self.weights_from: Path | None = None
        self.weights_match: WeightMatch | None = None

    def take_over(self, launched: Launched) -> None:
        """Resume as a launcher decides it."""
        self.resume_from, self.on_progress, self.is_restart = launched.resume, launched.on_progress, launched.is_restart
        self.resume_until, self.skip_batches, self.rollback_time = launched.rollback

    @property
    def assets(self) -> Assets:
        """The assets of the weights: a tokenizer, names of classes, ids of special tokens."""
        return self._state.assets

    def take_weights(self) -> None:
        """Load the weights of ``checkpoint.weights`` into a run that begins, once.

        `colossus.initialize` calls this, unless the run may resume from a checkpoint, for which `resume` looks first.
        The first step calls it at the latest.

        Raises:
            CheckpointError: on all ranks, if they are not whole, or not of this model.
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
        """Resume from `resume_from`, once; a run without a checkpoint loads ``checkpoint.weights`` instead.

        If `resume_from` is no single checkpoint and the newest is damaged, the newest whole one is loaded, after a
        warning. Returns the checkpoint from which the run resumes.

        Raises:
            CheckpointError: on all ranks, if it is no whole checkpoint of this model.
        """
        wanted = self.resume_from
        if self._config.every:
            _ = self.root  # raises now, and not at the first save, if there is none
        if self.resumed_from is not None:
            return None
        restored = self._resume_restarted() if self.is_restart else None
        if wanted is not None and restored is None:
            find = folder.find_latest if wanted == "auto" else folder.locate
            path = self.root if wanted == "auto" else Path(wanted)
            with under_key(f"checkpoint.resume = {wanted!r}"):
                restored = self._restore_newest(lambda damaged: find(path, damaged))
        if restored is None:
            self.take_weights()
        if self.is_restart and self.resume_until is not None:
            self._leave_branch(self.resume_until)
        return restored

    def _resume_restarted(self) -> Path | None:
        """Resume from the newest whole save of this run up to `resume_until`; return None if there is none.

        Raises:
            CheckpointError: on all ranks, if all saves are later, and older ones were removed.
            RuntimeError: on all ranks, if one in memory cannot be read to its end, and there is none on the disk.
        """
        until, is_first = self.resume_until, self._run.context.is_logging_rank

        def latest_on_disk() -> tuple[bool, int]:
            """Return whether there is a save on the disk, and the step of the newest that is whole."""
            if not self._config.every or not is_first:
                return False, -1
            try:
                latest = folder.find_latest(self.root, until=until)
            except DamagedCheckpoint:  # raised below if there is nothing else to resume from
                return True, -1
            return latest is not None, -1 if latest is None else read_manifest(latest).step

        mine = on_all_ranks(self._world, latest_on_disk, names_ranks=False)
        is_on_disk, step = broadcast_object(mine, self._world, 0)
        restored = self._restore_from_memory(step, until, is_all=not is_on_disk)
        if restored is None and is_on_disk:
            restored = self._restore_newest(lambda damaged: folder.find_latest(self.root, damaged, until))
        if restored is None and until is not None and self._config.every:
            on_all_ranks(self._world, lambda: self._require_none_later(until) if is_first else None, names_ranks=False)
        if self._memory is not None:
            self._memory.remove_later(self._run.completed_steps if restored is not None else -1)
        return restored

    def _require_none_later(self, until: int) -> None:
        """Raise CheckpointError if the run has later saves only: it neither starts anew nor removes them."""
        later = [path.name for path, step in folder.checkpoint_steps(self.root).items() if step > until]
        if later and until >= self._config.every:
            raise CheckpointError(
                f"{self.root}: the run must go back to step {until} or before, but has only later checkpoints: "
                f"{', '.join(later)}. None is removed; `--resume` resumes from the newest nevertheless. A larger "
                f"checkpoint.keep_last (now {self._config.keep_last}) keeps older ones"
            )

    def _leave_branch(self, until: int) -> None:
        """Remove later saves and leave batches out; then save the run, so that a later resume skips them, too."""
        run, step = self._run, self._run.completed_steps
        if self._config.every and run.context.is_logging_rank:
            folder.remove_later(self.root, step)
        skipped = until + 1 - step if self.skip_batches is None else self.skip_batches
        if not skipped or run.loaders is None or run.rolled_back == self.rollback_time:
            return
        loader = run.loaders.train
        if not isinstance(loader, Loader):
            raise ConfigError(
                f"train.on_spike: no batches can be left out of a {type(loader).__name__} that replaces "
                f"engine.loaders.train: pass the data to colossus.initialize, or set train.on_spike.action=raise"
            )
        loader.set_step(loader.step + skipped)
        run.rolled_back = self.rollback_time
        if run.context.is_logging_rank:
            log.warning("%s after step %d left out", counted(skipped, "batch", "es"), step)
        if self._config.every:
            self.save(background=False).wait()
            self.finish()

    def _restore_from_memory(self, later_than: int, until: int | None, *, is_all: bool) -> Path | None:
        """Restore the newest checkpoint in the hosts' memory that is newer than the disk; return None if there is none.

        Args:
            later_than: step of the newest on the disk.
            until: latest step.
            is_all: whether the disk has no checkpoint that could be loaded if this one fails halfway.
        """
        memory = self._host_memory()
        reader = memory.newest(later_than, until) if memory is not None else None
        if reader is None:
            return None
        try:
            with torch.inference_mode(False), reader:
                self._state.restore(reader, self.on_progress)
        except CheckpointError as error:  # on all ranks, for example if another host cannot be reached any more
            problem = f"the checkpoint in memory {reader.folder.name} cannot be loaded: {error}"
            if is_all:  # no CheckpointError, which would end the run: the next attempt may succeed
                raise RuntimeError(
                    f"{problem}; there is none on the disk (checkpoint.every) to load instead"
                ) from error
            if self._run.context.is_logging_rank:
                log.warning("%s", problem)
            return None
        self.resumed_plan = str(reader.manifest.plan.get("text", "another plan"))
        self.resumed_from, self.is_same_run, self._has_begun, self._saved_step = reader.folder, True, True, None
        return reader.folder

    def load(self, path: Path | str) -> None:
        """Load the whole state of a checkpoint, under any plan: the run continues after its step.

        Under the plan of the checkpoint the run is bit for bit the one that was saved. Under another plan all
        parameters and their state are the same to the bit. State of single ranks (random generators, the position in a
        user's loader, buffers that differ between ranks) is that of the first rank, or begins anew. Changes of the
        config apply: more steps, another precision, lr or weight decay, another order of the data, with warnings of one
        rank. The optimizer must be of the same class.

        Args:
            path: a checkpoint; or a folder of them, or a run folder, whose newest whole one is loaded.

        Raises:
            CheckpointError: on all ranks, before anything is changed, if it is no whole checkpoint of this model.
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
        """Load parameters and buffers of a checkpoint, without optimizer and step, to begin fine-tuning.

        The optimizer's state stays as it is. The plans of run and checkpoint may differ. Names are those of the whole
        model; query, key and value are separate; a tied parameter is found under any of its names.

        Args:
            path: as for `load`; or a model folder of Hugging Face, whose tensors have our names then.
            only: patterns (`fnmatch`) of names in this model, ``["blocks.*"]``; all others keep their values.
            rename: names of the checkpoint to names in this model, a function or a dict (`matching.renamed`).
            strict: whether to refuse if a wanted tensor is not in the checkpoint, or the checkpoint has another one or
                another shape. False loads what fits, and logs the rest.
            grow: patterns of names in this model that may have more rows (dim 0) than were saved, for a larger
                vocabulary or more positions: the saved rows are loaded, the others keep their initial values. Learned
                positions of a model with a smaller ``seq_len`` load the first rows without a pattern.
            average: name of the average that a hook of the run has kept, "ema" or "swa", to load in place of the
                parameters.

        Returns:
            Tensors that were loaded, missing, left over, of another shape: the same on all ranks.

        Raises:
            CheckpointError: on all ranks, before anything is changed, if it is not whole, does not fit, or a pattern or
                a rename matches nothing.
        """
        if isinstance(only, str) or isinstance(grow, str):
            raise ValueError("load_weights: only and grow take lists of patterns: only=['blocks.*']")

        def take(reader: CheckpointReader) -> None:
            self.weights_match = self._state.load_weights(
                reader, only=only, rename=rename, strict=strict, grow=grow, on_progress=self.on_progress
            )

        self.weights_from = self.read_newest(lambda damaged: find_weights(path, damaged), take, average)
        self._has_begun = True
        assert self.weights_match is not None
        if not self.weights_match.is_complete and self._run.context.is_logging_rank:
            log.warning("not loaded from %s: %s", self.weights_from, self.weights_match)
        return self.weights_match

    def _restore_newest(self, find: Find) -> Path | None:
        def take(reader: CheckpointReader) -> None:
            self._state.restore(reader, self.on_progress)
            self.resumed_plan = str(reader.manifest.plan.get("text", "another plan"))

        restored = self.read_newest(find, take)
        if restored is not None:
            self._has_begun = True
            self.resumed_from = restored
            self.weights_from = self.weights_match = None
            has_root = self._dir is not None or self._run.folder is not None
            self.is_same_run = has_root and restored.parent.resolve() == self.root.resolve()
            self._saved_step = self._run.completed_steps if self.is_same_run else None
            if self.is_same_run and self._config.every and self._run.context.is_logging_rank:
                # perhaps an older one: a run that is killed before its next save resumes in this branch
                folder.resume_from(restored, self._config.keep_last)
        return restored

    def read_newest(
        self, find: Find, take: Callable[[CheckpointReader], object], average: str | None = None
    ) -> Path | None:
        """Read the checkpoint that rank 0 finds; if a checksum shows that it is damaged, the next one that it finds."""
        self._require_own_parameters()
        self._run.strategy.sync_point()
        self.finish()
        self._saved_step = None
        damaged: dict[Path, CheckpointError] = {}
        is_first = self._run.context.is_logging_rank
        while True:
            mine = on_all_ranks(self._world, lambda: find(damaged) if is_first else None, names_ranks=False)
            path = broadcast_object(mine, self._world, 0)
            if path is None:
                return None
            try:
                # tensors that are made in inference mode could not be trained
                opens = partial(open_weights, path, average)
                with torch.inference_mode(False), on_all_ranks(self._world, opens) as reader:
                    take(reader)
            except DamagedCheckpoint as error:
                damaged[path] = error
                if is_first:
                    log.warning("%s", error)
            else:
                return path
