"""What the benchmarks share: alternating blocks, ratios with their spread, tables, JSON. No torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from colossus.compare.interleaved import AGAIN, Series, Spread, alternate, environment, ratio, unique
from colossus.progress import progress

__all__ = [
    "AGAIN", "Series", "Spread", "alternate", "environment", "make_parser", "print_table", "progress", "ratio",
    "unique", "write_json",
]  # fmt: skip


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


def write_json(path: Path | None, payload: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps({"environment": environment(), **payload}, indent=1, default=vars) + "\n")
