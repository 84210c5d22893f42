"""The training loop around ``engine.train_step``: how many steps, when to evaluate, when to stop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from colossus.engine.hooks import Hook
from colossus.engine.results import StepResult

if TYPE_CHECKING:
    from colossus.engine.engine import Engine


@dataclass(frozen=True)
class FitSummary:
    """How a call of ``fit`` ended.

    Attributes:
        steps: optimizer steps completed since the beginning of the run.
        reason: ``finished`` (``train.steps`` reached) or ``stopped`` (``engine.request_stop`` on any rank).
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
    if engine.eval_loader is None or not train.eval_every:
        return False
    return bool(step == train.steps or step % train.eval_every == 0)


def fit(engine: Engine, hooks: Sequence[Hook] = ()) -> FitSummary:
    """Train until ``train.steps`` or until a stop is requested, and say which it was.

    Resumes and saves as the config's section ``checkpoint`` says, also after the last step, be it the last because of a
    stop (`Checkpoints`).

    Every rank calls this. A request to stop is summed in each step's all-reduce, so that all ranks leave the loop after
    the same step. The evaluation due at that step is left out: a stop should be quick. Where the run goes on from a
    checkpoint it is made up for.

    Raises:
        ValueError: when the loader ends although training has not.
        Exception: whatever a step or a hook raised, after every hook's ``on_exception``.
    """
    steps = engine.config.train.steps
    evaluations = DueEvaluations(engine)
    engine.checkpoints.hooks = [*hooks, evaluations]
    result, stopped, stop_signal = None, False, None
    completed = engine.completed_steps
    try:
        engine.checkpoints.resume()
        completed = engine.completed_steps
        for hook in hooks:
            hook.on_train_start(engine)
        if evaluations.is_owed:
            stopped, stop_signal = evaluations.run(hooks)
        batches = iter(engine.loader)
        while completed < steps and not stopped:
            for hook in hooks:
                hook.on_step_start(engine)
            result = engine.train_step(_next_batch(batches, completed, steps))
            completed, stopped, stop_signal = result.step, result.stop_requested, result.stop_signal
            for hook in hooks:
                hook.on_step_end(engine, result)
            if not stopped and evaluation_due(engine, completed):
                stopped, stop_signal = evaluations.run(hooks)
            _save_if_due(engine, hooks)
        engine.strategy.sync_point()  # a replica that is through answers those that are not
        _save_if_due(engine, hooks, is_last=True)
        for hook in hooks:
            hook.on_train_end(engine)
    except BaseException as error:
        _report_exception(engine, hooks, error)
        engine.checkpoints.finish()  # what was to be saved before may be all that is left
        raise
    finally:
        engine.withdraw_stop()  # a later call is not meant
    reason: Literal["finished", "stopped"] = "finished" if completed >= steps else "stopped"
    loss = _loss_of_all(engine, result) if result is not None else None
    return FitSummary(completed, reason, loss, evaluations.last_loss, stop_signal)


def _loss_of_all(engine: Engine, result: StepResult) -> float:
    """The loss of the last step, which is the replica's own where a stop has made it the last."""
    if result.replica is None:
        return result.loss
    engine.strategy.sync_point()
    return result.of_all_replicas(engine.strategy.sum_over_replicas).loss


class DueEvaluations(Hook):
    """Evaluates, and remembers in checkpoints that an evaluation was left out because of a stop: it is made up for.

    The name of the class is in checkpoints.

    Attributes:
        is_owed: whether the run goes on behind a step whose evaluation was left out.
        last_loss: of the last evaluation, None when there was none.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._step: int | None = None
        self.is_owed = False
        self.last_loss: float | None = None

    def run(self, hooks: Sequence[Hook]) -> tuple[bool, int | None]:
        """Evaluate. Returns whether it was stopped, and the signal that was the reason."""
        summary = self._engine.evaluate()
        if summary.complete:
            self._step, self.last_loss, self.is_owed = summary.step, summary.loss, False
            for hook in hooks:
                hook.on_eval_end(self._engine, summary)
        return not summary.complete, summary.stop_signal

    def state_dict(self) -> dict[str, Any]:
        step = self._engine.completed_steps
        is_owed = self.is_owed or (evaluation_due(self._engine, step) and self._step != step)
        return {"is_owed": True} if is_owed else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.is_owed = bool(state["is_owed"]) and self._engine.eval_loader is not None


def _save_if_due(engine: Engine, hooks: Sequence[Hook], *, is_last: bool = False) -> None:
    for saved in engine.checkpoints.after_step(is_last=is_last):
        for hook in hooks:
            hook.on_checkpoint(engine, saved)


def _next_batch(batches: Iterator[Any], completed: int, steps: int) -> Any:
    try:
        return next(batches)
    except StopIteration:
        raise ValueError(
            f"the data ended after {completed} of {steps} steps: let the loader start over at its end, "
            f"or set train.steps={completed}"
        ) from None


def _report_exception(engine: Engine, hooks: Sequence[Hook], error: BaseException) -> None:
    for hook in hooks:
        try:
            hook.on_exception(engine, error)
        except Exception as second:  # the first error is the one to raise
            error.add_note(f"then {type(hook).__name__}.on_exception raised {type(second).__name__}: {second}")
