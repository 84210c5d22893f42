"""Charts: lines over an axis and stacked bars, as text or as a picture. No torch.

Text is drawn here, so that it needs nothing installed: a character of braille has 2 x 4 dots. Pictures are
matplotlib's (`colossus.picture`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from colossus.picture import check_picture, new_figure

#: of Okabe and Ito (2008): colours that people who are colour-blind tell apart
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777")
_DASHES = ("-", "--", ":", "-.")
#: bit of a dot in a braille character, by row and column
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
#: what parts of bars are drawn with: a full block and shades, then ASCII
_FILLS = "\u2588\u2592\u2591\u2593#=+:-."
#: what a line's place in a legend shows where it is drawn in braille
_DASH = "\u2812\u2812"


@dataclass(frozen=True)
class Line:
    """One line. Where a number is not finite, or not above zero on a logarithmic axis, it has a gap.

    Attributes:
        label: its name in the legend; a line without one is not there.
        style: ``faint`` stands behind other lines in a picture, and is left out of text.
        colour: which of `PALETTE`; by default its place among the panel's lines. Lines that belong together share one.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: Literal["line", "faint", "markers"] = "line"
    colour: int | None = None


@dataclass(frozen=True)
class Panel:
    """Lines over one pair of axes."""

    title: str
    lines: Sequence[Line]
    x_label: str = ""
    y_label: str = ""
    log_y: bool = False

    def colour(self, line: Line) -> int:
        return next(at for at, each in enumerate(self.lines) if each is line) if line.colour is None else line.colour

    def heights(self, line: Line) -> list[float]:
        """Each point's place on the y axis (its logarithm where the axis is logarithmic), NaN for a gap."""
        if self.log_y:
            return [math.log10(y) if 0 < y < math.inf else math.nan for y in line.y]
        return [y if math.isfinite(y) else math.nan for y in line.y]


@dataclass(frozen=True)
class Bars:
    """Bars one below the other, each of parts.

    Attributes:
        names: of the bars.
        parts: name of a part -> its size in each bar.
    """

    title: str
    names: Sequence[str]
    parts: Mapping[str, Sequence[float]]
    x_label: str = ""


def readable(value: float) -> str:
    """``0.0003``, ``1500``, ``20k``, ``1.5M``."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(unit, 1e4):
            return f"{value / unit:.6g}{letter}"
    return f"{value:.6g}"


# -- text -----------------------------------------------------------------------------------------------------------


def text_chart(panel: Panel | Bars, width: int = 80, height: int = 16, *, colour: bool = False) -> str:
    """A chart as lines of text, of at most so many columns and rows; bars take the rows they need.

    Args:
        colour: lines in colours (ANSI escapes) and braille. Without it, where there are several, each is drawn with a
            letter of its own, markers with the capital one.
    """
    return _text_bars(panel, width, colour) if isinstance(panel, Bars) else _text_lines(panel, width, height, colour)


def _text_lines(panel: Panel, width: int, height: int, colour: bool) -> str:
    lines = sorted((line for line in panel.lines if line.style != "faint"), key=lambda line: line.style == "markers")
    points = [list(zip(line.x, panel.heights(line), strict=True)) for line in lines]
    shown = [point for each in points for point in each if not math.isnan(point[1])]
    if not shown:
        return f"{panel.title}\n  no numbers"
    places = [panel.colour(line) for line in lines]
    has_letters = not colour and len(set(places)) > 1
    marks = [_mark(line, place, has_letters) for line, place in zip(lines, places, strict=True)]
    entries = [(mark or _DASH, line.label, place) for mark, line, place in zip(marks, lines, places, strict=True)]
    legend = _legend(entries, width, colour)

    (left, right), (low, high) = (_range(values) for values in zip(*shown, strict=True))
    rows = max(3, height - 3 - len(legend))
    down = (4 * rows - 1) / (high - low)
    y_ticks = (_log_ticks if panel.log_y else ticks)(low, high, max(2, rows // 2))
    labels = {round((high - at) * down) // 4: readable(10**at if panel.log_y else at) for at in y_ticks}
    margin = max(map(len, labels.values()), default=0) + 1
    columns = max(8, width - margin - 1)
    across = (2 * columns - 1) / (right - left)

    #: (row, column) of a character -> its last line, and the dots of all
    cells: dict[tuple[int, int], tuple[int, int]] = {}
    for at, (line, own) in enumerate(zip(lines, points, strict=True)):
        for row, column in _dots([((high - y) * down, (x - left) * across) for x, y in own], line.style == "line"):
            cell = row // 4, column // 2
            cells[cell] = at, cells.get(cell, (0, 0))[1] | _BRAILLE[row % 4][column % 2]

    chart = [" " * (margin + 1) + " ".join(filter(None, (panel.title, panel.y_label and f"({panel.y_label})")))]
    for row in range(rows):
        drawn = [" "] * columns
        for column in range(columns):
            if (row, column) in cells:
                at, bits = cells[row, column]
                drawn[column] = _paint(marks[at] or chr(0x2800 + bits), places[at], colour)
        edge = "\u2524" if row in labels else "\u2502"
        chart.append(f"{labels.get(row, ''):>{margin}}{edge}{''.join(drawn).rstrip()}")
    return "\n".join([*chart, *_x_axis(panel.x_label, left, right, margin, columns), *legend])


def _mark(line: Line, place: int, has_letters: bool) -> str:
    """The character that a line is drawn with; none: braille."""
    if not has_letters:
        return "o" if line.style == "markers" else ""
    letter = chr(ord("a") + place % 26)
    return letter.upper() if line.style == "markers" else letter


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The smallest and the largest; where they are the same, a tenth of it (or 1) to either side."""
    low, high = min(values), max(values)
    room = (abs(low) / 10 or 1.0) if high - low <= 1e-9 * max(abs(low), abs(high)) else 0.0
    return low - room, high + room


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from ``low`` to ``high``, 1, 2 or 5 times a power of ten apart, at most so many."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * times for times in (1, 2, 5, 10, 20, 50) if (high - low) / (power * times) <= most - 1)
    return [at * step for at in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """Logarithms of powers of ten, or of other round numbers where there are no two powers between the logarithms."""
    powers = [float(at) for at in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]
    if len(powers) > 1:
        return powers[:: -(-len(powers) // most)]
    return [math.log10(at) for at in ticks(10**low, 10**high, most) if at > 0]


def _dots(points: Sequence[tuple[float, float]], is_joined: bool) -> Iterator[tuple[int, int]]:
    """The dots of points and, where they are joined, of the straight lines between neighbours."""
    before = (math.nan, math.nan)
    for point in points:
        if not math.isnan(point[0]):
            start = before if is_joined and not math.isnan(before[0]) else point
            steps = max(1, math.ceil(max(abs(b - a) for a, b in zip(start, point, strict=True))))
            for step in range(steps + 1):
                row, column = (round(a + (b - a) * step / steps) for a, b in zip(start, point, strict=True))
                yield row, column
        before = point


def _x_axis(label: str, left: float, right: float, margin: int, columns: int) -> tuple[str, str]:
    """The axis, its label at the end, and its numbers below their ticks."""
    axis, numbers = ["\u2500"] * columns, [" "] * (margin + 1 + columns)
    end = 0
    for at in ticks(left, right, max(2, columns // 10)):
        column, text = round((at - left) / (right - left) * (columns - 1)), readable(at)
        start = min(max(margin + 1 + column - len(text) // 2, 0), len(numbers) - len(text))
        if start >= end:
            axis[column] = "\u252c"
            numbers[start : start + len(text)] = text
            end = start + len(text) + 1
    axis = [*axis[: columns - len(label) - 1], f" {label}"] if label else axis
    return f"{'':>{margin}}\u2514{''.join(axis)}", "".join(numbers).rstrip()


def _legend(entries: Sequence[tuple[str, str, int]], width: int, colour: bool) -> list[str]:
    """Marks and labels (with their colours) in as many rows as they need; nothing where there is one."""
    rows: list[str] = []
    used = width
    for mark, label, place in entries if len(entries) > 1 else ():
        if label:
            text = f"  {mark} {label}"[:width]
            if used + len(text) > width:
                rows.append("")
                used = 0
            rows[-1] += _paint(text, place, colour)
            used += len(text)
    return rows


def _paint(text: str, place: int, colour: bool) -> str:
    if not colour:
        return text
    red, green, blue = bytes.fromhex(PALETTE[place % len(PALETTE)][1:])
    return f"\033[38;2;{red};{green};{blue}m{text}\033[0m"


def _text_bars(bars: Bars, width: int, colour: bool) -> str:
    totals = [sum(sizes) for sizes in zip(*bars.parts.values(), strict=True)]
    longest = max(totals, default=0.0)
    if not longest > 0:
        return f"{bars.title}\n  no numbers"
    names = [name if len(name) <= width // 3 else f"{name[: width // 3 - 1]}\u2026" for name in bars.names]
    margin = max(map(len, names)) + 1
    scale = max(8, width - margin - 10) / longest
    rows = [" " * margin + " ".join(filter(None, (bars.title, bars.x_label and f"({bars.x_label})")))]
    for at, (name, total) in enumerate(zip(names, totals, strict=True)):
        drawn, below = "", 0.0
        for place, sizes in enumerate(bars.parts.values()):
            length = round((below + sizes[at]) * scale) - round(below * scale)
            drawn += _paint(_FILLS[place % len(_FILLS)] * length, place, colour)
            below += sizes[at]
        rows.append(f"{name:<{margin}}{drawn} {readable(total)}")
    entries = [(_FILLS[place % len(_FILLS)], name, place) for place, name in enumerate(bars.parts)]
    return "\n".join([*rows, *_legend(entries, width, colour)])


# -- pictures -------------------------------------------------------------------------------------------------------


def save_charts(panels: Sequence[Panel | Bars], path: Path) -> None:
    """Draw charts into one picture. What the first names is named once, below all.

    Raises:
        ValueError: when the file's ending is none of `colossus.picture.FORMATS`, its folder is not there, or matplotlib
            is not.
    """
    check_picture(path)
    columns = 1 if len(panels) == 1 else 2 if len(panels) <= 6 else 3
    rows = -(-len(panels) // columns)
    figure = new_figure(7.5 if columns == 1 else 5.5 * columns, 0.3 + 3.0 * rows)
    every = figure.subplots(rows, columns, squeeze=False).flatten()
    common: dict[str, Any] = {}
    for axes, panel in zip(every, panels, strict=False):
        handles = _draw_bars(axes, panel) if isinstance(panel, Bars) else _draw_lines(axes, panel)
        axes.set_title(panel.title, loc="left", fontsize=10)
        common = common or handles
        if len(handles) > 1 and not handles.keys() <= common.keys():
            axes.legend(handles.values(), handles.keys(), fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    for axes in every[len(panels) :]:
        axes.set_axis_off()
    if len(common) > 1:
        fitting = int(14 * figure.get_figwidth() / (8 + max(map(len, common))))
        place = dict(loc="outside lower center", ncols=max(1, min(fitting, len(common))))
        figure.legend(common.values(), common.keys(), fontsize=8, frameon=False, **place)
    figure.savefig(path, dpi=150)


def _draw_lines(axes: Any, panel: Panel) -> dict[str, Any]:
    """Draw a panel.

    Returns:
        label -> what the legend shows of it
    """
    handles = {}
    for line in panel.lines:
        place, heights = panel.colour(line), panel.heights(line)
        look: dict[str, Any] = dict(linestyle=_DASHES[place // len(PALETTE) % len(_DASHES)], linewidth=1.4)
        if line.style == "markers":
            look = dict(linestyle="none", marker="o", markersize=5, markeredgecolor="white", zorder=3)
        elif line.style == "faint":
            look |= dict(linewidth=0.8, alpha=0.3)
        elif sum(map(math.isfinite, heights)) == 1:
            look |= dict(marker=".")
        y = [10**height if panel.log_y else height for height in heights]
        (handle,) = axes.plot(line.x, y, color=PALETTE[place % len(PALETTE)], **look)
        if line.label:
            handles[line.label] = handle
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_formatter(_shown)
    axes.set_yscale("log" if panel.log_y else "linear")
    axes.yaxis.set_major_formatter(_shown)
    if panel.log_y:
        low, high = axes.get_ylim()
        axes.yaxis.set_minor_formatter(_shown if high < 10 * low else "")
    return handles


def _draw_bars(axes: Any, bars: Bars) -> dict[str, Any]:
    left = [0.0] * len(bars.names)
    handles = {}
    for place, (name, sizes) in enumerate(bars.parts.items()):
        colour = PALETTE[place % len(PALETTE)]
        handles[name] = axes.barh(range(len(left)), sizes, left=left, color=colour, edgecolor="white", height=0.6)
        left = [below + size for below, size in zip(left, sizes, strict=True)]
    axes.set_yticks(range(len(left)), bars.names)
    axes.invert_yaxis()
    axes.set_xlabel(bars.x_label)
    axes.xaxis.set_major_formatter(_shown)
    return handles


def _shown(value: float, _: int) -> str:
    return readable(value)
