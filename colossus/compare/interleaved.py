"""Timing side by side, in blocks that take turns, and ratios block by block. No torch.

Noise of the machine then falls on all runners alike.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colossus.config import without_credentials
from colossus.progress import progress

#: name -> seconds, one per block
Series = dict[str, list[float]]

AGAIN = " (again)"


@dataclass(frozen=True)
class Spread:
    """Median and quartiles over blocks."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(series: Series, name: str, against: str) -> Spread:
    """Return the time of ``name`` over that of ``against``, block by block. Noise slower than a block cancels."""
    return Spread.of([a / b for a, b in zip(series[name], series[against], strict=True)])


def alternate(runners: Mapping[str, Callable[[], float]], blocks: int, *, label: str = "") -> Series:
    """Return the seconds of every runner in every block.

    Each block runs all of them once. The order is reversed from block to block, so that a drift of the machine within
    a block falls on all alike.
    """
    series: Series = {name: [] for name in runners}
    names = list(runners)
    for block in range(blocks):
        progress(f"{label} block {block + 1}/{blocks}".lstrip())
        for name in names if block % 2 == 0 else reversed(names):
            series[name].append(runners[name]())
    progress("")
    return series


def unique_labels(names: Sequence[str]) -> dict[str, str]:
    """Return label -> name. A repeated name runs the same code against itself, and its label ends in ``(again)``."""
    labels: dict[str, str] = {}
    for name in names:
        label = name
        while label in labels:
            label += AGAIN
        labels[label] = name
    return labels


def environment() -> dict[str, Any]:
    """Return the properties of the machine and its software on which times depend."""
    return {
        "command": without_credentials(" ".join([Path(sys.argv[0]).name, *sys.argv[1:]])),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
