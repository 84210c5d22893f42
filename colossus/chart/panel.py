"""What a chart shows, its colours, and the numbers at its axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

#: of Okabe and Ito (2008): colours that people who are colour-blind tell apart
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777")


@dataclass(frozen=True)
class Line:
    """One line. Where a number is not finite, or not above zero on a logarithmic axis, it has a gap.

    Attributes:
        label: its name in the legend; a line without one is not there.
        style: ``faint`` stands behind other lines in a picture, and is left out of text.
        colour: which of `PALETTE`; by default its place among the panel's lines. Lines that belong together share one.
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
        """Which of `PALETTE` a line has."""
        return next(at for at, each in enumerate(self.lines) if each is line) if line.colour is None else line.colour

    @property
    def has_whole_x(self) -> bool:
        """Whether the x axis counts: a number that is not whole means nothing there."""
        return all(x == int(x) for line in self.lines for x in line.x)

    def heights(self, line: Line) -> list[float]:
        """Each point's place on the y axis (its logarithm where the axis is logarithmic), NaN for a gap."""
        if self.log_y:
            return [math.log10(y) if 0 < y < math.inf else math.nan for y in line.y]
        return [y if math.isfinite(y) else math.nan for y in line.y]


@dataclass(frozen=True)
class Bars:
    """Bars one below the other, each of parts.

    Attributes:
        names: of the bars.
        parts: name of a part -> its size in each bar.
        limit: a line across all bars, by its name.
    """

    title: str
    names: Sequence[str]
    parts: Mapping[str, Sequence[float]]
    x_label: str = ""
    limit: tuple[str, float] | None = None


def readable(value: float) -> str:
    """``0.0003``, ``1500``, ``20k``, ``1.5M``."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(unit, 1e4):
            return f"{value / unit:.6g}{letter}"
    return f"{value:.6g}"


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from ``low`` to ``high``, 1, 2 or 5 times a power of ten apart, at most so many."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power * times for times in (1, 2, 5, 10, 20)):
        found = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
        if len(found) <= most:
            break
    return [at * step for at in found]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Logarithms of round numbers between two logarithms: powers of ten; where those are fewer than three, also 2 and 5
    times them; where these still are, any."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    for factors in ((1,), (1, 2, 5)):
        every = [power + math.log10(factor) for power in powers for factor in factors]
        found = [at for at in every if low - 1e-9 <= at <= high + 1e-9]
        if len(found) > 2:
            return found[:: -(-len(found) // most)]
    return [math.log10(at) for at in ticks(10**low, 10**high, most) if at > 0]
