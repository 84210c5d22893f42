"""Tables, parsers and JSON of all benchmarks, beside alternating blocks and ratios with their spread. No torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from colossus.compare.interleaved import AGAIN, Series, Spread, alternate, environment, ratio, unique_labels
from colossus.progress import progress

__all__ = [
    "AGAIN", "Series", "Spread", "alternate", "environment", "make_parser", "print_table", "progress", "ratio",
    "unique_labels", "write_json",
]  # fmt: skip


#: loss and gradient norm of each step
Pairs = Sequence[tuple[float, float]]


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print columns as wide as they need to be, the first one to the left."""
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


def make_parser(description: str | None, *, blocks: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have; without ``blocks`` none that compare in blocks."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if blocks is not None:
        parser.add_argument("--blocks", type=int, default=blocks, help="alternating blocks (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to a file as well")
    parser.add_argument("--smoke", action="store_true", help="a few seconds at toy sizes: does it run?")
    return parser


def check_trajectory(name: str, steps: Pairs, expected: Pairs, against: str, tolerance: float, digits: int = 6) -> None:
    """Compare the loss and the gradient norm of each step, relative above 1 and absolute below.

    Raises:
        RuntimeError: the first step that differs, with both numbers.
    """
    for step, (mine, theirs) in enumerate(zip(steps, expected, strict=True), 1):
        for what, a, b in zip(("loss", "gradient norm"), mine, theirs, strict=True):
            if not abs(a - b) <= tolerance * max(1.0, abs(b)):
                raise RuntimeError(f"{name}: {what} {a:.{digits}f} at step {step}, but {against} has {b:.{digits}f}")


def write_json(path: Path | None, payload: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps({"environment": environment(), **payload}, indent=1, default=vars) + "\n")
