"""Saves where an evaluation was the best so far: ``hooks = [dict(type="BestCheckpoint")]``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from colossus.checkpoint.durable import remove
from colossus.checkpoint.folder import name_best, name_of
from colossus.checkpoint.writer import SavedCheckpoint
from colossus.engine.engine import Engine
from colossus.engine.results import EvalResult
from colossus.monitor.hooks.metric_hook import MetricHook
from colossus.monitor.hooks.options import BestCheckpointOptions

log = logging.getLogger("colossus.checkpoint")


class BestCheckpoint(MetricHook):
    """Keeps the checkpoints of the ``keep`` best evaluations among those of the run, under ``checkpoints``.

    The file ``checkpoints/best`` names them, the best first, and is taken wherever a checkpoint is: `colossus evaluate
    RUN/checkpoints/best`. What it names stays, whatever ``checkpoint.keep_last`` says; what it names no more is
    removed, unless its step is one of ``checkpoint.every`` or ``keep_every``. A run that is resumed goes on with what
    it has kept.
    """

    def __init__(self, **options: Any) -> None:
        self.options: BestCheckpointOptions = BestCheckpointOptions(**options)
        #: (number, step) of each that is kept, the best first
        self._kept: list[tuple[float, int]] = []
        #: steps of those that were, until the one that takes their place is complete
        self._dropped: list[int] = []

    def on_train_start(self, engine: Engine) -> None:
        super().on_train_start(engine)
        _ = engine.checkpoints.root  # that there is one is found now, and not at the first save
        if engine.checkpoints.resumed_from is not None and not engine.checkpoints.goes_on:
            self._kept = []  # they are of the run that this one has begun from
        if self._kept:
            self._name(engine)

    def on_eval_end(self, engine: Engine, summary: EvalResult) -> None:
        value = self.value_of(summary)
        kept = [each for each in self._kept if each[1] != summary.step]
        place = next((at for at, (other, _) in enumerate(kept) if self.is_better(value, other)), len(kept))
        if place == self.options.keep or not self.is_better(value, None):
            return
        kept.insert(place, (value, summary.step))
        self._kept = kept[: self.options.keep]
        self._dropped += [step for _, step in kept[self.options.keep :]]
        self._name(engine)
        engine.checkpoints.is_wanted = True  # no save yet: hooks behind this one have not heard of the evaluation

    def on_checkpoint(self, engine: Engine, saved: SavedCheckpoint) -> None:
        if saved.step not in [step for _, step in self._kept]:
            return
        dropped, self._dropped = self._dropped, []
        section = engine.config.checkpoint
        regular = [every for every in (section.every, section.keep_every) if every]
        self._name(engine, [step for step in dropped if all(step % every for every in regular)])

    def _name(self, engine: Engine, removed: Sequence[int] = ()) -> None:
        """On the logging rank. A disk that does not take it ends no run, as a save that fails does not."""
        if not engine.context.is_logging_rank:
            return
        root = engine.checkpoints.root
        try:
            name_best(root, [*(step for _, step in self._kept), *self._dropped])
            for step in removed:
                remove(root / name_of(step))
        except OSError as error:
            log.warning("%s: the best checkpoints cannot be named: %s", root, error)

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [list(each) for each in self._kept]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept = [(value, step) for value, step in state["kept"]]
