"""A number of each evaluation, by name: whether it is better than another."""

from __future__ import annotations

from colossus.engine.results import EvalResult
from colossus.monitor.hooks.options import MetricOptions
from colossus.registry import nearest


def value_of(summary: EvalResult, options: MetricOptions, hook: object) -> float:
    """The number that a hook looks at.

    Raises:
        ValueError: on all ranks, when an evaluation has none of that name; names the nearest one and all.
    """
    numbers = summary.numbers
    if options.metric not in numbers:
        close = nearest(options.metric, list(numbers))
        hint = f"; did you mean {close!r}?" if close else ""
        raise ValueError(
            f"{type(hook).__name__}: the evaluation after step {summary.step} has no {options.metric!r}{hint} "
            f"It has {', '.join(numbers)}"
        )
    return numbers[options.metric]


def is_better(value: float, other: float | None, options: MetricOptions, min_delta: float = 0.0) -> bool:
    """Whether a value is better than another by more than ``min_delta``; NaN is not, anything else is better than
    None."""
    if other is None:
        return value == value
    return value < other - min_delta if options.mode == "min" else value > other + min_delta
