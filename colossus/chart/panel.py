"""The contents of charts: lines, their colours, and the numbers at their axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

#: colours that people who are colour-blind can tell apart (Okabe and Ito, 2008)
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777")


@dataclass(frozen=True)
class Line:
    """A line of a panel.

    It has a gap where y is not finite, and on a logarithmic axis also where y is not positive.

    Attributes:
        label: its name in the legend; a line with an empty label is not listed there.
        style: ``faint`` lines are drawn behind the others in a picture, and are left out of text.
        colour: index into `PALETTE`, by default the line's index in its panel. Related lines can share a colour.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: Literal["line", "faint", "markers"] = "line"
    colour: int | None = None


@dataclass(frozen=True)
class Panel:
    """Lines over one pair of axes."""

    title: str
    lines: Sequence[Line]
    x_label: str = ""
    y_label: str = ""
    log_y: bool = False

    def colour(self, line: Line) -> int:
        """Return the index into `PALETTE` of a line's colour."""
        return next(at for at, own in enumerate(self.lines) if own is line) if line.colour is None else line.colour

    @property
    def has_whole_x(self) -> bool:
        """Return whether all x are whole numbers (steps), so that a tick between two of them means nothing."""
        return all(x == int(x) for line in self.lines for x in line.x)

    def heights(self, line: Line) -> list[float]:
        """Return the y of each point as it is drawn: its logarithm on a logarithmic axis, NaN for a gap."""
        if self.log_y:
            return [math.log10(y) if 0 < y < math.inf else math.nan for y in line.y]
        return [y if math.isfinite(y) else math.nan for y in line.y]


def readable(value: float) -> str:
    """Return a number as an axis shows it: ``0.0003``, ``1500``, ``20k``, ``1.5M``."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(unit, 1e4):
            return f"{value / unit:.6g}{letter}"
    return f"{value:.6g}"


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most ``most`` round numbers from ``low`` to ``high``, 1, 2 or 5 times a power of ten apart."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power * times for times in (1, 2, 5, 10, 20)):
        multiples = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
        if len(multiples) <= most:
            break
    return [at * step for at in multiples]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Return the logarithms of round numbers between two logarithms.

    These are powers of ten. If fewer than three lie between, 2 and 5 times a power of ten are added; if there are still
    fewer than three, the result is that of `ticks`.
    """
    powers = range(math.floor(low), math.ceil(high) + 1)
    for factors in ((1,), (1, 2, 5)):
        logs = [power + math.log10(factor) for power in powers for factor in factors]
        within = [at for at in logs if low - 1e-9 <= at <= high + 1e-9]
        if len(within) > 2:
            return within[:: -(-len(within) // most)]
    return [math.log10(at) for at in ticks(10**low, 10**high, most) if at > 0]
