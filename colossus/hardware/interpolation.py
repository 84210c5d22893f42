"""Interpolation between measured times: straight lines between logarithms, which never fall when the work grows."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence


class Curve:
    """Seconds by size; below the smallest size and above the largest they are those of that size.

    A size that took longer than a larger one gets the larger one's seconds: a disturbance can only make a measured time
    longer.

    Args:
        sizes: at least two positive sizes, rising.
        seconds: the seconds of each.
    """

    def __init__(self, sizes: Sequence[float], seconds: Sequence[float]) -> None:
        self.sizes = list(sizes)
        self._logs = [math.log(min(seconds[at:])) for at in range(len(seconds))]

    def at(self, size: float) -> float:
        at, part = _position(self.sizes, size)
        low, high = self._logs[at : at + 2]
        return math.exp(low + part * (high - low))


class ProductGrid:
    """Seconds of products by their smallest dim a and the product P of the other two.

    The measured products are [a, b] x [b, b] for sizes a <= b, so that P = b^2. As a^2 <= P for any product, the grid
    is a triangle. A cell is interpolated between its four corners, a cell on the diagonal between the three that
    exist. Both coordinates rise with each dim, and so do the seconds. Above the largest size the seconds rise in
    proportion to the operations. Below the smallest they stay: there most of the time does not depend on the size.

    Args:
        sizes: at least two sizes, rising.
        seconds: seconds by (a, b), for all pairs of sizes with a <= b.
    """

    def __init__(self, sizes: Sequence[int], seconds: Mapping[tuple[int, int], float]) -> None:
        self.sizes = list(sizes)
        self._squares = [float(size * size) for size in sizes]
        count = len(sizes)
        self._logs = {
            (i, j): math.log(min(seconds[sizes[a], sizes[b]] for a in range(i, count) for b in range(max(a, j), count)))
            for i in range(count)
            for j in range(i, count)
        }

    def at(self, m: int, n: int, k: int) -> float:
        smallest, *others = sorted((m, n, k))
        area = float(others[0] * others[1])
        beyond = max(1.0, smallest / self.sizes[-1]) * max(1.0, area / self._squares[-1])
        i, a = _position(self.sizes, smallest)
        j, b = _position(self._squares, area)
        logs = self._logs
        if i == j:
            log = logs[i, i] + b * (logs[i, i + 1] - logs[i, i]) + a * (logs[i + 1, i + 1] - logs[i, i + 1])
        else:
            near = logs[i, j] + a * (logs[i + 1, j] - logs[i, j])
            far = logs[i, j + 1] + a * (logs[i + 1, j + 1] - logs[i, j + 1])
            log = near + b * (far - near)
        return math.exp(log) * beyond


def _position(sizes: Sequence[float], size: float) -> tuple[int, float]:
    """Return the index of the interval that has ``size`` (or is nearest to it), and its place there from 0 to 1.

    The place is a fraction of the interval's logarithm.
    """
    at = min(max(bisect.bisect_right(sizes, size) - 1, 0), len(sizes) - 2)
    low, high = sizes[at : at + 2]
    if size <= low:
        return at, 0.0
    return at, 1.0 if size >= high else math.log(size / low) / math.log(high / low)
