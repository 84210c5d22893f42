"""A comparison as one picture: loss over steps and over time, tokens per second, bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from colossus.compare.summary import Comparison, Mean
from colossus.picture import new_figure


def save(comparison: Comparison, path: str | Path, title: str, counted: str = "tokens") -> None:
    """Draw it: lines are training losses (means over the last 20th of all steps), dots validation losses.

    Args:
        counted: what the loss counts.
    """
    rows = [row for row in comparison.rows if row.label in comparison.curves]
    figure = new_figure(13, 5.5 + 0.32 * len(rows))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    (over_steps, over_time), (speed, sent) = figure.subplots(2, 2, height_ratios=(4, 1 + 0.4 * len(rows)))
    for number, row in enumerate(rows):
        for curve in comparison.curves[row.label]:
            is_first = curve is comparison.curves[row.label][0]
            style = dict(color=f"C{number}", linewidth=1.2)
            start = curve.window - 1  # shorter means are no means
            seconds = dict(zip(curve.steps, curve.seconds, strict=True))
            for axes, xs in ((over_steps, curve.steps), (over_time, curve.seconds)):
                label = row.label if is_first else None
                axes.plot(xs[start:], curve.losses[start:], label=label, **style)
            over_steps.plot(*_dots(curve.validation, None), "o", markersize=4, color=f"C{number}")
            over_time.plot(*_dots(curve.validation, seconds), "o", markersize=4, color=f"C{number}")
    over_steps.set(xlabel="steps", ylabel="loss")
    over_time.set(xlabel="seconds of steps")
    if comparison.equal_seconds:
        over_time.axvline(comparison.equal_seconds, color="grey", linewidth=0.8, linestyle=":")
    over_time.legend(fontsize=8, loc="upper right")
    labels = [row.label for row in rows]
    _bars(speed, labels, [row.tokens_per_second for row in rows], 1.0, f"{counted} per second, all replicas")
    _bars(sent, labels, [row.bytes_sent for row in rows], 1e-6, "MB that the first rank sends in a step")
    figure.savefig(path)


def _dots(validation: dict[int, float], seconds: dict[int, float] | None) -> tuple[list[float], list[float]]:
    xs = [float(step) if seconds is None else seconds[step] for step in validation]
    return xs, list(validation.values())


def _bars(axes: Any, labels: list[str], values: list[Mean | None], scale: float, name: str) -> None:
    sizes = [0.0 if value is None else value.mean * scale for value in values]
    bars = axes.barh(range(len(labels)), sizes, color=[f"C{number}" for number in range(len(labels))])
    axes.bar_label(
        bars, labels=[f"{size:,.3g}" if size < 1000 else f"{size:,.0f}" for size in sizes], fontsize=8, padding=3
    )
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_title(name, loc="left", fontsize=9)
