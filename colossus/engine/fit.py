"""The training loop around ``engine.train_step``: how many steps, when to evaluate, when to stop; its hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from colossus.checkpoint.writer import SavedCheckpoint
from colossus.engine.results import EvalResult, StepResult

if TYPE_CHECKING:
    from colossus.engine.engine import Engine

#: after a failure, for the end of a save in memory
_PATIENCE_SECONDS = 2.0
_END = object()


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
        reads them in the next ``on_step_end`` waits for nothing (see `colossus.monitor.metrics.LateResults`).
        """

    def add_to_evaluation(self, engine: Engine, summary: EvalResult) -> Mapping[str, float]:
        """After an evaluation, before any ``on_eval_end``: further numbers of it, the same on all ranks.

        By names that no other hook gives (``ema.validation_loss``): `EvalResult.numbers` has them, so the rows of
        metrics, early stops and best checkpoints have.
        """
        return {}

    def on_eval_end(self, engine: Engine, summary: EvalResult) -> None:
        """After an evaluation, which follows the ``on_step_end`` of the step it belongs to."""

    def add_to_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Further numbers for the row of a step in ``metrics.jsonl``, on the logging rank alone.

        `colossus.monitor.metrics.Metrics` asks once the numbers of the step are there, on an accelerator one step late.

        Args:
            row: what it has without hooks.
        """
        return {}

    def on_row(self, row: Mapping[str, Any]) -> None:
        """The row of a step is written, that of its evaluation included; on the logging rank alone.

        In the order of steps, each once; the last ones may come at ``on_train_end``, or ``on_exception``. Numbers of an
        evaluation that end in a row which was written before (`fit` makes up what a stop has left out) come alone,
        with ``step`` and ``time``.
        """

    def on_save(self, engine: Engine) -> None:
        """A checkpoint of the state as it is between two steps is about to be saved: what belongs to the steps so far
        and lies elsewhere (rows of metrics) must be on the disk before it is complete, so before this returns. What it
        raises fails the save. It may come before ``on_train_start`` where a run goes back (``train.on_spike``).
        """

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

    def parameter_state(self) -> Mapping[nn.Parameter, Mapping[str, Any]]:
        """What a checkpoint is to keep for each parameter as it is stored (``engine.store.parameters()``): tensors of
        its shape, others that are the same on all ranks, or plain values. Called on all ranks. It is saved by logical
        name, and so taken back under another plan. What is named ``average`` can be evaluated and exported in the place
        of the parameters (``--weights``).
        """
        return {}

    def load_parameter_state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Take back what `parameter_state` gave, before `load_state_dict`; empty when the checkpoint has none."""


@dataclass(frozen=True)
class FitSummary:
    """How a call of ``fit`` ended.

    Attributes:
        steps: optimizer steps completed since the beginning of the run.
        reason: ``finished`` (``train.steps`` reached, and the last one evaluated where that was due) or ``stopped``
            (``engine.request_stop`` on any rank).
        loss: training loss of the last step, of all replicas, None when no step ran.
        validation_loss: of the last evaluation, None when there was none.
        stop_signal: number of the signal to any rank that stopped it, None when none did.
    """

    steps: int
    reason: Literal["finished", "stopped"]
    loss: float | None = None
    validation_loss: float | None = None
    stop_signal: int | None = None


def evaluation_due(engine: Engine, step: int) -> bool:
    """Whether an evaluation follows step ``step``: every ``train.eval_every`` steps and after the last one.

    Never when ``train.eval_every`` is 0 or there is no validation data.
    """
    train = engine.config.train
    return _evaluates(engine) and bool(step == train.steps or step % train.eval_every == 0)


def _evaluates(engine: Engine) -> bool:
    return engine.eval_loader is not None and engine.config.train.eval_every > 0


def fit(engine: Engine, hooks: Sequence[Hook] = ()) -> FitSummary:
    """Train until ``train.steps`` or until a stop is requested, and say which it was.

    Resumes and saves as the config's section ``checkpoint`` says, also after the last step, be it the last because of a
    stop (`Checkpoints`).

    Every rank calls this. A request to stop is summed in each step's all-reduce, so that all ranks leave the loop after
    the same step. The evaluation due at that step is left out, since a stop should be quick: the run that goes on from
    the checkpoint begins with it.

    Raises:
        ValueError: when the loader ends although training has not.
        Exception: whatever a step or a hook raised, after every hook's ``on_exception``.
    """
    steps = engine.config.train.steps
    engine.checkpoints.hooks = hooks
    result, validation_loss, stopped, stop_signal = None, None, False, None
    try:
        engine.checkpoints.resume()
        completed = begun = engine.completed_steps
        for hook in hooks:
            hook.on_train_start(engine)
        engine.run.owes_evaluation = engine.run.owes_evaluation and _evaluates(engine)
        batches = iter(engine.loader)
        while True:
            if engine.run.owes_evaluation and not stopped:
                summary = _evaluate(engine, hooks)
                stopped, stop_signal = not summary.complete, summary.stop_signal
                validation_loss = summary.loss if summary.complete else validation_loss
            if completed > begun or engine.checkpoints.is_wanted:
                _save_if_due(engine, hooks)
            if completed >= steps or stopped:
                break
            for hook in hooks:
                hook.on_step_start(engine)
            batch = next(batches, _END)
            if batch is _END:
                raise ValueError(
                    f"the data ended after {completed} of {steps} steps: let the loader start over at its end, or set "
                    f"train.steps={completed}"
                )
            result = engine.train_step(batch)
            completed, stopped, stop_signal = result.step, result.stop_requested, result.stop_signal
            engine.run.owes_evaluation = evaluation_due(engine, completed)
            for hook in hooks:
                hook.on_step_end(engine, result)
        engine.strategy.sync_point()  # a replica that is through answers those that are not
        _save_if_due(engine, hooks, is_last=True)
        for hook in hooks:
            hook.on_train_end(engine)
    except BaseException as error:
        for hook in hooks:
            try:
                hook.on_exception(engine, error)
            except Exception as second:  # the first error is the one to raise
                error.add_note(f"then {type(hook).__name__}.on_exception raised {type(second).__name__}: {second}")
        # what was to be saved before may be all that is left; a rank that is stuck never writes its part
        engine.checkpoints.finish_all(_PATIENCE_SECONDS)
        raise
    finally:
        engine.withdraw_stop()  # a later call is not meant
    loss = None
    if result is not None:
        if result.replica is not None:  # of this replica alone, where a stop has made it the last
            engine.strategy.sync_point()
            result = result.of_all_replicas(engine.strategy.sum_over_replicas)
        loss = result.loss
    is_finished = completed >= steps and not engine.run.owes_evaluation
    return FitSummary(completed, "finished" if is_finished else "stopped", loss, validation_loss, stop_signal)


def _evaluate(engine: Engine, hooks: Sequence[Hook]) -> EvalResult:
    """Evaluate, and tell the hooks, unless a stop has ended it: then the run still owes it."""
    summary = engine.evaluate()
    if summary.complete:
        more = {name: x for hook in hooks for name, x in hook.add_to_evaluation(engine, summary).items()}
        summary = replace(summary, more=more)
        engine.run.owes_evaluation = False
        for hook in hooks:
            hook.on_eval_end(engine, summary)
    return summary


def _save_if_due(engine: Engine, hooks: Sequence[Hook], *, is_last: bool = False) -> None:
    for saved in engine.checkpoints.after_step(is_last=is_last):
        for hook in hooks:
            hook.on_checkpoint(engine, saved)
