"""Bars for figures of benchmarks. matplotlib comes with the extra ``plot`` and is imported when something is drawn."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Spread

SUFFIXES = (".png", ".svg")


@dataclass(frozen=True)
class Panel:
    """One quantity: label -> its value, or its spread, drawn with the quartiles. ``line``: a value to compare with."""

    title: str
    values: Mapping[str, float | Spread]
    line: float | None = None


def obstacle(path: Path) -> str | None:
    """Why nothing could be drawn into this file, to be asked before anything is measured."""
    if path.suffix not in SUFFIXES:
        return f"--plot {path}: the name ends in none of {', '.join(SUFFIXES)}"
    if importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib, which comes with an extra: pip install -e '.[plot]'"
    return None


def bars(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Panels side by side with one row per label, the first on top; a label without a value in a panel has no bar."""
    labels = list(dict.fromkeys(label for panel in panels for label in panel.values))
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(1.5 + 3.5 * len(panels), 1.2 + 0.28 * len(labels)), layout="constrained"
    )
    figure.suptitle(title, fontsize="medium")
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        _draw(axes, panel, {label: row for row, label in enumerate(labels)})
        axes.set_yticks(range(len(labels)), labels if index == 0 else [""] * len(labels))
        axes.set_ylim(len(labels) - 0.4, -0.6)
    figure.savefig(path, dpi=150)


def _draw(axes: Any, panel: Panel, rows: Mapping[str, int]) -> None:
    kinds = list(dict.fromkeys(map(_kind, rows)))
    for label, value in panel.values.items():
        row, spread = rows[label], value if isinstance(value, Spread) else Spread(value, value, value)
        axes.barh(row, spread.median, color=f"C{kinds.index(_kind(label))}", height=0.7)
        if isinstance(value, Spread):
            ends = [[spread.median - spread.low], [spread.high - spread.median]]
            axes.errorbar(spread.median, row, xerr=ends, color="black", capsize=2)
        axes.text(max(spread.high, spread.median), row, f"  {spread.median:.3g}", va="center", fontsize="x-small")
    if panel.line is not None:
        axes.axvline(panel.line, color="gray", linewidth=0.8, linestyle="--")
    axes.set_title(panel.title, fontsize="small")
    axes.margins(x=0.18)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)


def _kind(label: str) -> str:
    """Labels of one kind have one colour: what stands before the first hyphen."""
    return label.partition("-")[0]
