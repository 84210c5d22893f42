"""Into how many partitions a table is cut: found from the times of steps. No torch.

As Parallax does it (1808.02621, section 3.2): a step takes t(P) = b / P + a (P - 1) + c, where b is work that
partitions share and a what each one costs, so that the best number is the square root of b / a.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

#: steps of which each number of partitions is timed, after one that is not
STEPS_EACH = 5


@dataclass(frozen=True)
class PartitionFit:
    """t(P) = b / P + a (P - 1) + c, in seconds, fitted to what was sampled.

    Attributes:
        times: P -> seconds of a step.
    """

    a: float
    b: float
    c: float
    times: Mapping[int, float]

    @classmethod
    def of(cls, times: Mapping[int, float]) -> PartitionFit:
        """By least squares; of fewer than three numbers the fit of smallest coefficients."""
        parts = np.array(list(times), dtype=np.float64)
        terms = np.stack((parts - 1, 1 / parts, np.ones_like(parts)), axis=1)
        scale = np.abs(terms).max(0)
        scale[scale == 0] = 1.0
        found = np.linalg.lstsq(terms / scale, np.array(list(times.values())), rcond=None)[0] / scale
        a, b, c = found.tolist()
        return cls(a, b, c, times)

    def best(self, low: int, high: int) -> int:
        """The number of partitions with the shortest step, in low..high.

        Where the fit has no minimum between (a partition costs nothing, or shares no work), that of the sampled numbers
        whose steps were shortest, the smallest of these.
        """
        changes = self.a * max(self.times) + self.b / min(self.times)  # of what steps take, the part that P changes
        if min(self.a, self.b) > 0 and changes > 1e-9 * max(self.times.values()):
            found = max(1, round(math.sqrt(self.b / self.a)))
        else:
            found = min(self.times, key=lambda parts: (self.times[parts], parts))
        return min(max(found, low), high)

    def __str__(self) -> str:
        sampled = ", ".join(f"{parts}: {1e3 * seconds:.3g} ms" for parts, seconds in self.times.items())
        return f"t(P) = {self.b:.3g} / P + {self.a:.3g} (P - 1) + {self.c:.3g} s, from {sampled}"


@dataclass
class PartitionSearch:
    """Which number is sampled next, doubling from the fewest until steps take longer.

    Attributes:
        low, high: the fewest and the most partitions.
        parts: the number that the steps that run now have.
        fit: once the search is over.
    """

    low: int
    high: int
    parts: int = field(init=False)
    fit: PartitionFit | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.high = max(self.low, self.high)
        self.parts = self.low
        self._times: dict[int, float] = {}

    def record(self, seconds: float) -> None:
        """What a step took with `parts`, the same number on all ranks: `parts` is the next one, or the best."""
        assert self.fit is None, "the search is over"
        times = self._times
        times[self.parts] = seconds
        following = min(2 * self.parts, self.high)
        is_longer = len(times) > 2 and seconds > times[list(times)[-2]]
        if following == self.parts or is_longer:
            self.fit = PartitionFit.of(times)
            self.parts = self.fit.best(self.low, self.high)
        else:
            self.parts = following
