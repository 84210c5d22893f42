"""Hooks: what surrounds the train step (metrics, displays, a user's own probes) without being in it."""

from __future__ import annotations

from typing import Any, Protocol


class StepLike(Protocol):
    """What ``engine.train_step`` returns, as far as hooks and ``fit`` read it."""

    @property
    def step(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def tokens(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def stop_requested(self) -> bool: ...


class EvaluationLike(Protocol):
    """What ``engine.evaluate`` returns: mean loss per valid token, and how many there were."""

    @property
    def loss(self) -> float: ...
    @property
    def tokens(self) -> int: ...


class Hook:
    """Override the moments you need; every method does nothing by default.

    ``fit`` calls hooks on every rank, in the order they were given. A hook that calls a collective must
    therefore do so on all ranks, and one that prints should ask ``engine.context.is_logging_rank`` first.
    """

    def on_train_start(self, engine: Any) -> None:
        """Once, before the first batch is read."""

    def on_step_start(self, engine: Any) -> None:
        """Before each step's batch is read: the time since then includes waiting for data."""

    def on_step_end(self, engine: Any, result: StepLike) -> None:
        """After each optimizer step; ``result.step`` counts from 1, its loss and norm are global values."""

    def on_eval_end(self, engine: Any, summary: EvaluationLike) -> None:
        """After an evaluation, which follows the ``on_step_end`` of the step it belongs to."""

    def on_train_end(self, engine: Any) -> None:
        """Once, after the last step, also when a stop was requested; not after an error."""

    def on_exception(self, engine: Any, error: BaseException) -> None:
        """When a step, an evaluation or a hook raised on this rank; the error goes on after all hooks ran."""
