"""Hooks: code that is called around train steps and evaluations (metrics, displays, a user's own)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from colossus.checkpoint.writer import SavedCheckpoint
from colossus.engine.results import EvalSummary, StepResult

if TYPE_CHECKING:
    from colossus.engine.engine import Engine


class Hook:
    """Base class: override the methods you need; each does nothing by default.

    ``fit`` calls hooks on every rank, in the order they were given. A hook that calls a collective must
    therefore do so on all ranks, and one that prints should check ``engine.context.is_logging_rank`` first.
    """

    def on_train_start(self, engine: Engine) -> None:
        """Once, before the first batch is read."""

    def on_step_start(self, engine: Engine) -> None:
        """Before each step's batch is read: time measured from here includes waiting for data."""

    def on_step_end(self, engine: Engine, result: StepResult) -> None:
        """After each optimizer step; ``result.step`` counts from 1, its loss and norm are global values.

        On an accelerator who reads them here waits for the step. `StepResult.send_to_host` starts their copy, and who
        reads them in the next ``on_step_end`` waits for nothing (`colossus.monitor.late_results` is a queue for that).
        """

    def on_eval_end(self, engine: Engine, summary: EvalSummary) -> None:
        """After an evaluation, which follows the ``on_step_end`` of the step it belongs to; or at the start of a run
        that goes on behind a step whose evaluation a stop has left out."""

    def on_save(self, engine: Engine) -> None:
        """A checkpoint of the state as it is between two steps is about to be saved: what belongs to the steps so far
        and lies elsewhere (rows of metrics) must be on the disk before it is complete, so before this returns. What it
        raises fails the save."""

    def on_checkpoint(self, engine: Engine, saved: SavedCheckpoint) -> None:
        """A checkpoint is complete: between two steps, at the latest before ``on_train_end``."""

    def on_train_end(self, engine: Engine) -> None:
        """Once, after the last step, also when a stop was requested; not after an error."""

    def on_exception(self, engine: Engine, error: BaseException) -> None:
        """When a step, an evaluation or a hook raised on this rank; it is raised again after all hooks ran."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint is to keep of this hook: numbers, strings, lists, dicts, tensors.

        Called on all ranks; that of rank 0 is saved, and given to all.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave, on all ranks before ``on_train_start``; not called if it gave nothing.

        It is found by the name of the class, and among several of one name by the order of the hooks.
        """
