"""A hook that adds the speed over a window of steps: ``hooks = ["Throughput"]``."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from colossus.engine.fit import Hook
from colossus.monitor.hooks.options import ThroughputOptions


class Throughput(Hook):
    """A hook that adds quartiles of step time and tokens per second over the last ``window`` steps to each row.

    They are ``step_seconds_first_quartile``, ``step_seconds_median``, ``step_seconds_third_quartile``, and
    ``tokens_per_second_window``, all tokens over all seconds. Evaluations do not count.
    """

    def __init__(self, **options: Any) -> None:
        window = ThroughputOptions(**options).window
        #: seconds and tokens of each step
        self._seconds: deque[float] = deque(maxlen=window)
        self._tokens: deque[float] = deque(maxlen=window)

    def add_to_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        self._seconds.append(row["step_seconds"])
        self._tokens.append(row["tokens_per_second"] * row["step_seconds"])
        first, median, third = np.quantile(self._seconds, (0.25, 0.5, 0.75)).tolist()
        return {
            "step_seconds_first_quartile": first,
            "step_seconds_median": median,
            "step_seconds_third_quartile": third,
            "tokens_per_second_window": sum(self._tokens) / sum(self._seconds),
        }
