"""A hook that saves after the best evaluations: ``hooks = [dict(type="BestCheckpoint")]``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from colossus.checkpoint.durable import remove
from colossus.checkpoint.folder import name_best, name_of
from colossus.checkpoint.save import SavedCheckpoint
from colossus.engine.engine import Engine
from colossus.engine.results import EvalResult
from colossus.monitor.hooks.metric_hook import MetricHook
from colossus.monitor.hooks.options import BestCheckpointOptions

log = logging.getLogger("colossus.checkpoint")


class BestCheckpoint(MetricHook):
    """A hook that keeps the checkpoints of the ``keep`` best evaluations among those of the run, under ``checkpoints``.

    The file ``checkpoints/best`` names them, the best first. It may be used wherever a checkpoint is: `colossus
    evaluate RUN/checkpoints/best`. The checkpoints that it names stay, whatever ``checkpoint.keep_last`` is. One that
    it names no longer is removed, unless its step is a multiple of ``checkpoint.every`` or ``keep_every``. A resumed
    run continues with those of its checkpoint.
    """

    def __init__(self, **options: Any) -> None:
        self.options: BestCheckpointOptions = BestCheckpointOptions(**options)
        #: (number, step) of the best evaluations, the best first
        self._best: list[tuple[float, int]] = []
        #: steps that are no longer among the best, until the checkpoint that replaces them is complete
        self._dropped: list[int] = []

    def on_train_start(self, engine: Engine) -> None:
        super().on_train_start(engine)
        _ = engine.checkpoints.root  # raises now, and not at the first save, if there is none
        if engine.checkpoints.resumed_from is not None and not engine.checkpoints.is_same_run:
            self._best = []  # they are checkpoints of another run, from which this one began
        if self._best:
            self._name(engine)

    def on_eval_end(self, engine: Engine, summary: EvalResult) -> None:
        value = self.value_of(summary)
        best = [entry for entry in self._best if entry[1] != summary.step]
        place = next((at for at, (other, _) in enumerate(best) if self.is_better(value, other)), len(best))
        if place == self.options.keep or not self.is_better(value, None):
            return
        best.insert(place, (value, summary.step))
        self._best = best[: self.options.keep]
        self._dropped += [step for _, step in best[self.options.keep :]]
        self._name(engine)
        engine.checkpoints.request_save()  # the save waits until later hooks have received the evaluation

    def on_checkpoint(self, engine: Engine, saved: SavedCheckpoint) -> None:
        if saved.step not in [step for _, step in self._best]:
            return
        dropped, self._dropped = self._dropped, []
        section = engine.config.checkpoint
        regular = [every for every in (section.every, section.keep_every) if every]
        self._name(engine, [step for step in dropped if all(step % every for every in regular)])

    def _name(self, engine: Engine, removed: Sequence[int] = ()) -> None:
        """Write the file ``best``, and remove checkpoints, on the logging rank. A disk error does not end the run."""
        if not engine.context.is_logging_rank:
            return
        root = engine.checkpoints.root
        try:
            name_best(root, [*(step for _, step in self._best), *self._dropped])
            for step in removed:
                remove(root / name_of(step))
        except OSError as error:
            log.warning("%s: the best checkpoints cannot be named: %s", root, error)

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [list(entry) for entry in self._best]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best = [(value, step) for value, step in state["kept"]]
