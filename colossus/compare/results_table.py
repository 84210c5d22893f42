"""The table that is printed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from colossus.arithmetic import byte_count, clock
from colossus.compare.summary import Comparison, Mean, Row

_NONE = "-"
_WIDEST = 10_000


def print_table(comparison: Comparison, console: Console, counted: str = "tokens") -> None:
    """Print the rows, what did not run, and what the columns are; a row is one line, however narrow the terminal.

    Args:
        counted: what the loss counts.
    """
    rows, after = comparison.rows, _duration(comparison.equal_seconds)
    has_validation = any(row.validation_loss for row in rows)
    columns = ["", "loss", *(["validation"] if has_validation else []), f"loss after {after}", f"{counted}/s", "step"]
    table = Table(*columns, "sent/step", "waited/step", "distance", box=None, pad_edge=False, header_style="bold")
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(row.label, *([*_cells(row, has_validation)] if not row.problems else []))
    console.width = max(
        console.width, console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
    )
    if comparison.equal_steps:
        console.print(table)
    for row in rows:
        for line in row.problems:
            console.print(f"{row.label}: {line}", markup=False, highlight=False, soft_wrap=True)
    for line in _notes(comparison, has_validation):
        console.print(line, markup=False, highlight=False, soft_wrap=True, style="dim")


def _cells(row: Row, has_validation: bool) -> list[str]:
    percent = _NONE if row.loss_ratio is None else f"{100 * (row.loss_ratio - 1):+.1f} %"
    faster = _NONE if row.tokens_ratio is None else f"x{row.tokens_ratio:.2f}"
    losses = [f"{_loss(row.loss)} {percent}"] if not has_validation else [_loss(row.loss)]
    losses += [f"{_loss(row.validation_loss)} {percent}"] if has_validation else []
    step = _seconds(row.step_seconds)
    return [
        *losses,
        _loss(row.loss_at_time),
        _NONE if row.tokens_per_second is None else f"{row.tokens_per_second.mean:,.0f} {faster}",
        step,
        _NONE if row.bytes_sent is None else byte_count(row.bytes_sent.mean),
        _seconds(row.wait_seconds),
        _NONE if row.consensus_distance is None else f"{row.consensus_distance.mean:.2g}",
    ]


def _loss(value: Mean | None) -> str:
    if value is None:
        return _NONE
    spread = "" if value.deviation is None else f" ({value.deviation:.4f})"
    return f"{value.mean:.4f}{spread}"


def _seconds(value: Mean | None) -> str:
    if value is None or math.isnan(value.mean):
        return _NONE
    return f"{1e3 * value.mean:.3g} ms" if value.mean < 1 else f"{value.mean:.3g} s"


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else clock(seconds)


def _notes(comparison: Comparison, has_validation: bool) -> Sequence[str]:
    if not comparison.equal_steps:
        return ["no run has come to its end, so there are no numbers"]
    averaged = any(row.loss is not None and row.loss.deviation is not None for row in comparison.rows)
    return [
        "",
        f"loss: training, the mean of the last 20th of {comparison.equal_steps} steps, and of those done after "
        f"{_duration(comparison.equal_seconds)} of steps, which the fastest run took for all of its own",
        *(["validation: after the same steps, of what the strategy evaluates"] if has_validation else []),
        *(["means over the seeds, in brackets standard deviations"] if averaged else []),
        f"percent and x: {'validation loss' if has_validation else 'loss'} and speed, to those of "
        f"{comparison.rows[0].label}",
    ]
