"""A table with one line for each row, however narrow the terminal. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def print_rows(console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows of cells: the label of the row, then one cell for each of the columns."""
    table = Table("", *columns, box=None, pad_edge=False, header_style="bold")
    for column in table.columns:
        column.no_wrap = True
        column.justify = "right" if column.header else "left"
    for row in rows:
        table.add_row(*row)
    console.width = max(console.width, console.measure(table, options=console.options.update(max_width=10_000)).maximum)
    console.print(table)


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print lines unchanged."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def seconds_text(value: float) -> str:
    """Return a time as ``45.6 us``, ``12.3 ms`` or ``1.23 s``."""
    if 0 < value < 1e-3:
        return f"{1e6 * value:.3g} us"
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"
