"""Saves where an evaluation was the best so far: ``hooks = [dict(type="BestCheckpoint")]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colossus.checkpoint.durable import remove
from colossus.checkpoint.folder import name_best, name_of
from colossus.checkpoint.writer import SavedCheckpoint
from colossus.engine.engine import Engine
from colossus.engine.fit import Hook
from colossus.engine.results import EvalResult
from colossus.monitor.hooks.metric import is_better, value_of
from colossus.monitor.hooks.options import BestCheckpointOptions


class BestCheckpoint(Hook):
    """Keeps the checkpoints of the ``keep`` best evaluations among those of the run, under ``checkpoints``.

    The file ``checkpoints/best`` names them, the best first, and is taken wherever a checkpoint is: `colossus evaluate
    RUN/checkpoints/best`. What it names stays, whatever ``checkpoint.keep_last`` says; what it names no more is one of
    the others, and is removed where ``checkpoint.every`` is 0. A run that is resumed goes on with what it has kept.

    Args:
        options: of `BestCheckpointOptions`.
    """

    def __init__(self, **options: Any) -> None:
        self.options = BestCheckpointOptions(**options)
        #: (number, step) of each that is kept, the best first
        self._kept: list[tuple[float, int]] = []
        #: of those that were, until the one that takes their place is complete
        self._dropped: list[tuple[float, int]] = []

    def on_train_start(self, engine: Engine) -> None:
        if engine.checkpoints.resumed_from is not None and not engine.checkpoints.goes_on:
            self._kept = []  # they are of the run that this one has begun from
        if self._kept:
            self._name(engine)

    def on_eval_end(self, engine: Engine, summary: EvalResult) -> None:
        value = value_of(summary, self.options, self)
        kept = [each for each in self._kept if each[1] != summary.step]
        place = next((at for at, (other, _) in enumerate(kept) if is_better(value, other, self.options)), len(kept))
        if place == self.options.keep or not is_better(value, None, self.options):
            return
        kept.insert(place, (value, summary.step))
        self._kept, dropped = kept[: self.options.keep], kept[self.options.keep :]
        self._dropped += dropped
        self._name(engine)
        engine.checkpoints.save()

    def on_checkpoint(self, engine: Engine, saved: SavedCheckpoint) -> None:
        if saved.step not in [step for _, step in self._kept]:
            return
        dropped, self._dropped = self._dropped, []
        self._name(engine)
        if engine.context.is_logging_rank and not engine.config.checkpoint.every:  # else they are of the newest, or not
            for _, step in dropped:
                remove(engine.checkpoints.root / name_of(step))

    def _name(self, engine: Engine) -> None:
        if engine.context.is_logging_rank:
            name_best(engine.checkpoints.root, [step for _, step in self._kept + self._dropped])

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [list(each) for each in self._kept]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept = [(value, step) for value, step in state["kept"]]
