"""The training loop around ``engine.train_step``: number of steps, evaluations, stops; its hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from colossus.checkpoint.save import SavedCheckpoint
from colossus.engine.results import EvalResult, StepResult

if TYPE_CHECKING:
    from colossus.engine.engine import Engine

#: longest wait for the end of a save in memory after a failure
_PATIENCE_SECONDS = 2.0
_END = object()


class Hook:
    """Base class of hooks: override the methods you need; each does nothing by default.

    ``fit`` calls hooks on every rank, in their order. A hook that calls a collective must therefore do so on all ranks,
    and one that prints should check ``engine.context.is_logging_rank`` first.
    """

    def on_train_start(self, engine: Engine) -> None:
        """Run once, before the first batch is read."""

    def on_step_start(self, engine: Engine) -> None:
        """Run before each step's batch is read: time measured from here includes waiting for data."""

    def on_step_end(self, engine: Engine, result: StepResult) -> None:
        """Run after each optimizer step; ``result.step`` counts from 1, its loss and norm are global values.

        On an accelerator, reading them here waits for the step. `StepResult.send_to_host` starts their copy, and
        reading them in the next ``on_step_end`` waits for nothing (see `colossus.comm.late.Late`).
        """

    def add_to_evaluation(self, engine: Engine, summary: EvalResult) -> Mapping[str, float]:
        """Return further numbers of an evaluation, the same on all ranks; called before any ``on_eval_end``.

        Their names must be unique (``ema.validation_loss``). They are in `EvalResult.numbers`, so metrics, early stops
        and best checkpoints have them.
        """
        return {}

    def on_eval_end(self, engine: Engine, summary: EvalResult) -> None:
        """Run after an evaluation, which follows the ``on_step_end`` of its step."""

    def add_to_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return further numbers for the row of a step in ``metrics.jsonl``, on the logging rank alone.

        `colossus.monitor.metrics.Metrics` calls it once the numbers of the step have arrived, on an accelerator one
        step late.

        Args:
            row: the row without numbers of hooks.
        """
        return {}

    def on_row(self, row: Mapping[str, Any]) -> None:
        """Run after the row of a step is written, with its evaluation; on the logging rank alone.

        Rows come in the order of steps, each once; the last ones may come at ``on_train_end``, or ``on_exception``.
        Numbers of an evaluation that complete a row written before (after a stop has left the evaluation out) come
        alone, with ``step`` and ``time``.
        """

    def on_save(self, engine: Engine) -> None:
        """Run before a checkpoint is saved between two steps; an error fails the save.

        Data of the steps so far that lies elsewhere (rows of metrics) must be on the disk when this returns. It may be
        called before ``on_train_start`` if a run goes back (``train.on_spike``).
        """

    def on_checkpoint(self, engine: Engine, saved: SavedCheckpoint) -> None:
        """Run after a checkpoint is complete: between two steps, at the latest before ``on_train_end``."""

    def on_train_end(self, engine: Engine) -> None:
        """Run once, after the last step, also if a stop was requested; not after an error."""

    def on_exception(self, engine: Engine, error: BaseException) -> None:
        """Run if a step, an evaluation or a hook raised on this rank; it is raised again after all hooks ran."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this hook for a checkpoint: numbers, strings, lists, dicts, tensors.

        It is called on all ranks; rank 0's is saved, and all ranks receive it.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, on all ranks before ``on_train_start``; not called if it was empty.

        It is found by the name of the class, and among several of one name by the order of the hooks.
        """

    def parameter_state(self) -> Mapping[nn.Parameter, Mapping[str, Any]]:
        """Return the state of this hook for each parameter as it is stored (``engine.store.parameters()``).

        It has tensors of the parameter's shape, others that are the same on all ranks, or plain values. It is called on
        all ranks. It is saved by logical name, and so can be loaded under another plan. An entry ``average`` can be
        evaluated and exported in place of the parameters (``--weights``).
        """
        return {}

    def load_parameter_state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Load the result of `parameter_state`, before `load_state_dict`; empty if the checkpoint has none."""


@dataclass(frozen=True)
class FitSummary:
    """The result of a call of ``fit``.

    Attributes:
        steps: optimizer steps completed since the beginning of the run.
        reason: ``finished`` (``train.steps`` reached, and the last one evaluated if that was due) or ``stopped``
            (``engine.request_stop`` on any rank).
        loss: training loss of the last step, over all replicas; None if no step ran.
        validation_loss: loss of the last evaluation; None if there was none.
        stop_signal: number of the signal to any rank that stopped it, or None.
    """

    steps: int
    reason: Literal["finished", "stopped"]
    loss: float | None = None
    validation_loss: float | None = None
    stop_signal: int | None = None


def evaluation_due(engine: Engine, step: int) -> bool:
    """Return whether an evaluation follows a step: every ``train.eval_every`` steps and after the last one.

    None follows if ``train.eval_every`` is 0 or there is no validation data.
    """
    train = engine.config.train
    return _evaluates(engine) and bool(step == train.steps or step % train.eval_every == 0)


def _evaluates(engine: Engine) -> bool:
    return engine.eval_loader is not None and engine.config.train.eval_every > 0


def fit(engine: Engine, hooks: Sequence[Hook] = ()) -> FitSummary:
    """Train until ``train.steps`` or until a stop is requested, and return which it was.

    It resumes and saves by the config's section ``checkpoint``, also after the last step, even if a stop has made it
    the last (`Checkpoints`).

    Every rank calls this. Each step's all-reduce sums the stop requests, so that all ranks leave the loop after the
    same step. The evaluation due at that step is left out, since a stop should be quick: a run that resumes from the
    checkpoint begins with it.

    Raises:
        ValueError: if the loader ends before training.
        Exception: any error of a step or a hook, after every hook's ``on_exception``.
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
            if completed > begun or engine.checkpoints.save_requested:
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
        engine.strategy.sync_point()  # a replica that has finished answers those that have not
        _save_if_due(engine, hooks, is_last=True)
        for hook in hooks:
            hook.on_train_end(engine)
    except BaseException as error:
        for hook in hooks:
            try:
                hook.on_exception(engine, error)
            except Exception as second:  # the first error is the one to raise
                error.add_note(f"then {type(hook).__name__}.on_exception raised {type(second).__name__}: {second}")
        # a save under way may be the last one; the wait is limited, since a stuck rank never writes its part
        engine.checkpoints.finish_all(_PATIENCE_SECONDS)
        raise
    finally:
        engine.withdraw_stop()  # so that it does not stop a later call
    loss = None
    if result is not None:
        if result.replica is not None:  # numbers of this replica alone, if a stop has made it the last step
            engine.strategy.sync_point()
            result = result.of_all_replicas(engine.strategy.sum_over_replicas)
        loss = result.loss
    is_finished = completed >= steps and not engine.run.owes_evaluation
    return FitSummary(completed, "finished" if is_finished else "stopped", loss, validation_loss, stop_signal)


def _evaluate(engine: Engine, hooks: Sequence[Hook]) -> EvalResult:
    """Evaluate and call the hooks, unless a stop has ended it: then the run still owes the evaluation."""
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
