"""The base of hooks that watch a number of each evaluation."""

from __future__ import annotations

from colossus.engine.engine import Engine
from colossus.engine.fit import Hook
from colossus.engine.results import EvalResult
from colossus.monitor.hooks.options import MetricOptions
from colossus.registry import nearest


class MetricHook(Hook):
    """A hook that finds a number by its name, and compares it with others."""

    options: MetricOptions

    def on_train_start(self, engine: Engine) -> None:
        """Raise ValueError if there will be no evaluations."""
        why = "there is no validation data" if engine.eval_loader is None else "train.eval_every = 0"
        if engine.eval_loader is None or not engine.config.train.eval_every:
            raise ValueError(f"{type(self).__name__} needs {self.options.metric!r} of evaluations, but {why}")

    def value_of(self, summary: EvalResult) -> float:
        """Return the number.

        Raises:
            ValueError: on all ranks, if an evaluation has no number of that name; it lists the nearest one and all.
        """
        numbers, metric = summary.numbers, self.options.metric
        if metric not in numbers:
            close = nearest(metric, list(numbers))
            hint = f"; did you mean {close!r}?" if close else ";"
            raise ValueError(
                f"{type(self).__name__}: the evaluation after step {summary.step} has no {metric!r}{hint} "
                f"it has {', '.join(numbers)}"
            )
        return numbers[metric]

    def is_better(self, value: float, other: float | None, min_delta: float = 0.0) -> bool:
        """Return whether a value is better than another by more than ``min_delta``.

        NaN is never better; any other number is better than None.
        """
        if other is None:
            return value == value
        return value < other - min_delta if self.options.mode == "min" else value > other + min_delta
