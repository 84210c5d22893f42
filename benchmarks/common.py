"""What the benchmarks share: alternating blocks, ratios with their spread, tables, JSON. No torch."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """Per-block time of ``name`` over that of ``against``: noise slower than a block is in both and cancels."""
    return Spread.of([a / b for a, b in zip(series[name], series[against], strict=True)])


def alternate(runners: Mapping[str, Callable[[], float]], blocks: int, *, label: str = "") -> Series:
    """Seconds of every runner in every block.

    Each block runs all of them once; the order turns round from block to block, so that a drift of the machine within a
    block falls on all alike.
    """
    series: Series = {name: [] for name in runners}
    names = list(runners)
    for block in range(blocks):
        progress(f"{label} block {block + 1}/{blocks}")
        for name in names if block % 2 == 0 else reversed(names):
            series[name].append(runners[name]())
    progress("")
    return series


def progress(text: str) -> None:
    """One line on stderr that the next one overwrites; silent when stderr is not a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def unique(names: Sequence[str]) -> dict[str, str]:
    """Label -> name; a name given twice is the same code against itself, labelled ``(again)``."""
    labels: dict[str, str] = {}
    for name in names:
        label = name
        while label in labels:
            label += AGAIN
        labels[label] = name
    return labels


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as they need to be, the first one to the left."""
    cells = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    print(f"\n{title}")
    for index, row in enumerate(cells):
        first, *others = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(["", first, *others]).rstrip())
        if index == 0:
            print("  " + "  ".join("-" * width for width in widths))


def make_parser(description: str | None, *, blocks: int) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=blocks, help="alternating blocks (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to a file as well")
    parser.add_argument("--smoke", action="store_true", help="a few seconds at toy sizes: does it run?")
    return parser


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def write_json(path: Path | None, payload: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps({"environment": environment(), **payload}, indent=1, default=vars) + "\n")
