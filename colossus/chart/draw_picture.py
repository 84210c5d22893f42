"""Pictures of charts, drawn by matplotlib (`colossus.picture`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from colossus.chart.panel import PALETTE, Panel, log_ticks, readable
from colossus.picture import check_picture, new_figure

_DASHES = ("-", "--", ":", "-.")


def save_charts(panels: Sequence[Panel], path: Path) -> None:
    """Draw charts into one picture, with one legend below them all for the labels of the first.

    A chart with labels that the first does not have gets a legend of its own.

    Raises:
        ValueError: the file's ending is none of `colossus.picture.FORMATS`, its folder does not exist, or matplotlib
            is not installed.
    """
    check_picture(path)
    columns = 1 if len(panels) == 1 else 2 if len(panels) <= 6 else 3
    rows = -(-len(panels) // columns)
    figure = new_figure(7.5 if columns == 1 else 5.5 * columns, 0.3 + 3.0 * rows)
    subplots = figure.subplots(rows, columns, squeeze=False).flatten()
    common: dict[str, Any] = {}
    for axes, panel in zip(subplots, panels, strict=False):
        handles = _draw_lines(axes, panel)
        axes.set_title(panel.title, loc="left", fontsize=10)
        axes.set_xlabel(panel.x_label)
        axes.xaxis.set_major_formatter(_tick_label)
        common = common or handles
        if not handles.keys() <= common.keys():
            place = dict(loc="upper left", bbox_to_anchor=(0.0, -0.22), ncols=_legend_columns(handles, 5.5))
            axes.legend(handles.values(), handles.keys(), fontsize=8, frameon=False, **place)
    for axes in subplots[len(panels) :]:
        axes.set_axis_off()
    if common:
        place = dict(loc="outside lower center", ncols=_legend_columns(common, figure.get_figwidth()))
        figure.legend(common.values(), common.keys(), fontsize=8, frameon=False, **place)
    figure.savefig(path, dpi=150)


def _legend_columns(labels: Collection[str], inches: float) -> int:
    return max(1, min(len(labels), int(14 * inches / (8 + max(map(len, labels))))))


def _draw_lines(axes: Any, panel: Panel) -> dict[str, Any]:
    """Draw the lines of a panel.

    Returns:
        The handle that the legend shows, by label.
    """
    handles = {}
    for line in panel.lines:
        place, heights = panel.colour(line), panel.heights(line)
        look: dict[str, Any] = dict(linestyle=_DASHES[place // len(PALETTE) % len(_DASHES)], linewidth=1.4)
        if line.style == "markers":
            look = dict(linestyle="none", marker="o", markersize=5, markeredgecolor="white", zorder=3)
        elif line.style == "faint":
            look |= dict(linewidth=0.8, alpha=0.3)
        elif len(line.y) == 1:
            look |= dict(marker=".")
        y = [10**height if panel.log_y else height for height in heights]
        (handle,) = axes.plot(line.x, y, color=PALETTE[place % len(PALETTE)], **look)
        if line.label:
            handles[line.label] = handle
    axes.set_ylabel(panel.y_label)
    axes.grid(alpha=0.3)
    axes.xaxis.get_major_locator().set_params(integer=panel.has_whole_x)
    if panel.log_y:
        axes.set_yscale("log")
        axes.minorticks_off()
        low, high = map(math.log10, axes.get_ylim())
        axes.set_yticks([10**at for at in log_ticks(low, high, 8)])
    axes.yaxis.set_major_formatter(_tick_label)
    return handles


def _tick_label(value: float, _: int) -> str:
    return readable(value)
