"""The user's calls that save and load the state of a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from colossus.checkpoint import folder
from colossus.checkpoint.errors import under_key
from colossus.checkpoint.matching import Rename, WeightMatch
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.save import Save, SavedCheckpoint
from colossus.checkpoint.weight_sources import Assets, find_weights
from colossus.engine.reference_weights import take_adapters
from colossus.engine.resumer import Resumed, Resumer
from colossus.engine.rollback import Rollback
from colossus.engine.saver import Saver
from colossus.state.collect import assets_of
from colossus.state.restore import load_weights
from colossus.state.run import Run, SavedHook

log = logging.getLogger("colossus.engine")


@dataclass(frozen=True)
class Launched:
    """The start of a run as its launcher decides it, the same on all ranks.

    Attributes:
        folder: the folder in which the launcher keeps the files of this run.
        resume: the checkpoint that `Checkpoints.resume` loads: "auto" (the latest of this run), a folder, or None.
        on_progress: called from any thread as a sign of life: a part of a checkpoint was written or read, or another
            replica for which this one waits has gone on.
        is_restart: whether the launcher has restarted the ranks: the run first looks for its newest whole save, in the
            memory of the hosts and on the disk.
        rollback: on a restart, whether and where the run goes back.
    """

    folder: Path
    resume: str | None
    on_progress: Callable[[], None]
    is_restart: bool = False
    rollback: Rollback | None = None


class Checkpoints:
    """The calls that save and load the whole state of a run. They are collective, if they do not say otherwise.

    `fit` follows the config's section ``checkpoint``. In a loop of your own call `resume` before it and `after_step` in
    it, or `save` and `load`.

    Attributes:
        hooks: hooks whose state belongs to the run; `fit` sets them. In a loop of your own set them before a load.
        resume_from: what `resume` loads: "auto" (the latest of this run), a folder, or None; by default that of the
            config.
        is_restart, rollback: a launcher's decision; see `Launched`.
        resumed_from: the checkpoint that was loaded, or None.
        resumed_plan: the plan it was saved under, as text.
        is_same_run: whether that is a checkpoint in this run's folder of checkpoints.
        weights_from: the checkpoint whose weights were loaded, or None.
        weights_match: the match of its tensors to the model's.
        stall_seconds: time that training has waited for checkpoints, since the engine was made.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._config = run, run.config.checkpoint
        self._saver = Saver(run)
        self.resumer = Resumer(run, self._saver)
        self._has_begun = self.is_restart = self.save_requested = False
        self.resume_from = self._config.resume
        self.rollback: Rollback | None = None
        self.resumed_from: Path | None = None
        self.resumed_plan, self.is_same_run = "", False
        self.weights_from: Path | None = None
        self.weights_match: WeightMatch | None = None

    def take_over(self, launched: Launched) -> None:
        """Resume as a launcher decides it."""
        self.resume_from, self.is_restart, self.rollback = launched.resume, launched.is_restart, launched.rollback

    @property
    def hooks(self) -> Sequence[SavedHook]:
        return self._run.hooks

    @hooks.setter
    def hooks(self, hooks: Sequence[SavedHook]) -> None:
        self._run.hooks = hooks

    @property
    def assets(self) -> Assets:
        """The assets of the weights: a tokenizer, names of classes, ids of special tokens."""
        return assets_of(self._run)

    @property
    def root(self) -> Path:
        """The folder of this run's checkpoints; ValueError if neither the config nor a launch defines one."""
        return self._saver.root

    @property
    def stall_seconds(self) -> float:
        return self._saver.stall_seconds

    # -- saving -------------------------------------------------------------------------------------------

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
        return self._saver.save(background=background)

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
        is_requested, self.save_requested = self.save_requested, False
        return self._saver.after_step(is_last=is_last, is_requested=is_requested, is_restart=self.is_restart)

    def finish(self) -> None:
        """Wait for the end of the save under way. If it failed and nobody has waited for it, rank 0 logs the error."""
        self._saver.finish()

    def finish_all(self, seconds: float = math.inf) -> None:
        """Call `finish`, and wait for the end of the save in memory under way, for at most this time."""
        self._saver.finish_all(seconds)

    def close(self) -> None:
        """Wait for the saves under way. After it nothing is saved in memory, nor read there by other hosts."""
        self._saver.close()

    # -- loading ------------------------------------------------------------------------------------------

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
                self.load_weights(**dict(weights))
        if not is_taken:
            take_adapters(self._run)

    def resume(self) -> Path | None:
        """Resume from `resume_from`, once; a run without a checkpoint loads ``checkpoint.weights`` instead.

        If `resume_from` is no single checkpoint and the newest is damaged, the newest whole one is loaded, after a
        warning. Returns the checkpoint from which the run resumes.

        Raises:
            CheckpointError: on all ranks, if it is no whole checkpoint of this model.
        """
        if self._config.every:
            _ = self.root  # raises now, and not at the first save, if there is none
        if self.resumed_from is not None:
            return None
        until = None if self.rollback is None else self.rollback.until
        resumed = self.resumer.resume_restarted(until) if self.is_restart else None
        if resumed is None:
            resumed = self.resumer.resume(self.resume_from)
        self._record(resumed)
        if resumed is None:
            self.take_weights()
        if self.is_restart and self.rollback is not None:
            self.resumer.leave_branch(self.rollback)
        return None if resumed is None else resumed.folder

    def _record(self, resumed: Resumed | None) -> None:
        if resumed is not None:
            self._has_begun = True
            self.resumed_from, self.resumed_plan, self.is_same_run = resumed
            self.weights_from = self.weights_match = None

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
        self._record(self.resumer.load(lambda damaged: folder.locate(Path(path), damaged)))

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

        matches: list[WeightMatch] = []

        def take(reader: CheckpointReader) -> None:
            matches.append(load_weights(self._run, reader, only=only, rename=rename, strict=strict, grow=grow))

        self.weights_from = self.resumer.read(lambda damaged: find_weights(path, damaged), take, average)
        self._has_begun = True
        self.weights_match = match = matches[-1]
        if not match.is_complete and self._run.context.is_logging_rank:
            log.warning("not loaded from %s: %s", self.weights_from, match)
        return match
