"""The rows as one table, and as JSON."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.common import environment
from benchmarks.gpu.section import Row

_STYLES = {"passed": "green", "failed": "bold red", "left out": "yellow"}


def counts(rows: Sequence[Row]) -> dict[str, int]:
    found = Counter(row.result for row in rows)
    return {"passed": found["passed"], "failed": found["failed"], "left out": found["left out"]}


def in_words(rows: Sequence[Row]) -> str:
    """``41 passed, 1 failed, 7 left out``"""
    return ", ".join(f"{count} {result}" for result, count in counts(rows).items())


def line(row: Row) -> str:
    """A row on one line, as it is told while the sections run."""
    return f"{row.result:<8} {row.section}: {row.name} ({row.seconds:.1f} s) {_told(row)}".rstrip()


def print_table(rows: Sequence[Row], console: Console | None = None) -> None:
    console = console or Console(width=None if os.isatty(1) else 160)
    table = Table(header_style="bold")
    table.add_column("section", no_wrap=True)
    table.add_column("case")
    table.add_column("result", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("figures, or what failed", ratio=1)
    before = None
    for section, result, told, alike in _grouped(rows):
        if before is not None and section != before:
            table.add_section()
        names = alike[0].name if len(alike) == 1 else f"{len(alike)} cases: {'; '.join(row.name for row in alike)}"
        seconds = sum(row.seconds for row in alike)
        table.add_row(
            section if section != before else "",
            escape(shorten(names, 100)),
            f"[{_STYLES[result]}]{result}[/]",
            f"{seconds:.1f}",
            escape(told),
        )
        before = section
    console.print(table)
    for row in rows:  # where the end of a long table is all that is seen
        if row.result == "failed":
            console.print(f"{line(row)}; log: {row.log}", markup=False, soft_wrap=True, highlight=False)


def _grouped(rows: Sequence[Row]) -> Iterator[tuple[str, str, str, list[Row]]]:
    """One row of the table each: what was left out for the same reason is told once."""
    for (section, result, told), group in groupby(rows, lambda row: (row.section, row.result, _told(row))):
        alike = list(group)
        for part in [alike] if result == "left out" else [[row] for row in alike]:
            yield section, result, told, part


def _told(row: Row) -> str:
    figures = ", ".join(f"{name} {_figure(value)}" for name, value in row.figures.items())
    return "; ".join(filter(None, (row.detail, figures)))


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "n/a" if value is None else str(value)


def write_json(path: Path, rows: Sequence[Row], about: Mapping[str, Any]) -> None:
    """All rows so far; a reader never sees half a file."""
    payload = {"environment": environment(), **about, **counts(rows), "rows": [row.as_json() for row in rows]}
    half = path.with_name(f".{path.name}.half")
    half.write_text(json.dumps(payload, indent=1, default=str) + "\n")
    half.replace(path)
