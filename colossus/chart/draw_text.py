"""Charts as text, drawn in braille: one character has 2 x 4 dots. It needs no package beside Python."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from colossus.chart.panel import PALETTE, Line, Panel, log_ticks, readable, ticks

#: the bit of a dot in a braille character, by row and column
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
#: mark in the legend of a line that is drawn in braille
_DASH = "\u2812\u2812"
#: ASCII replacements, for encodings without these characters
_IN_ASCII = {0x2800 + bits: "*" for bits in range(1, 256)} | dict(
    zip(map(ord, "\u2524\u2502\u2500\u252c\u2514"), "+|-++", strict=True)
)


def text_chart(panel: Panel, width: int = 80, height: int = 16, *, colour: bool = False) -> str:
    """Return a chart as text.

    Args:
        panel: the chart.
        width: columns at most.
        height: rows at most.
        colour: draw lines in braille and in colours (ANSI escapes). Without it, each of several lines is drawn with its
            own letter, and its markers with the capital letter.
    """
    lines = sorted((line for line in panel.lines if line.style != "faint"), key=lambda line: line.style == "markers")
    points = [list(zip(line.x, panel.heights(line), strict=True)) for line in lines]
    finite = [point for line_points in points for point in line_points if not math.isnan(point[1])]
    if not finite:
        return f"{panel.title}\n  no numbers"
    places = [panel.colour(line) for line in lines]
    has_letters = not colour and len(set(places)) > 1
    marks = [_mark(line, place, has_letters) for line, place in zip(lines, places, strict=True)]
    entries = [(mark or _DASH, line.label, place) for mark, line, place in zip(marks, lines, places, strict=True)]
    legend = _legend(entries, width, colour)

    (x_low, x_high), (low, high) = (_range(values) for values in zip(*finite, strict=True))
    rows = max(3, height - 3 - len(legend))
    down = (4 * rows - 1) / (high - low)
    y_ticks = (log_ticks if panel.log_y else ticks)(low, high, max(2, rows // 2))
    labels = {round((high - at) * down) // 4: readable(10**at if panel.log_y else at) for at in y_ticks}
    margin = max(map(len, labels.values()), default=0) + 1
    columns = max(8, width - margin - 1)
    across = (2 * columns - 1) / (x_high - x_low)

    #: (row, column) of a character -> the last line through it, and the dots of all lines
    cells: dict[tuple[int, int], tuple[int, int]] = {}
    for at, (line, line_points) in enumerate(zip(lines, points, strict=True)):
        scaled = [((high - y) * down, (x - x_low) * across) for x, y in line_points]
        for row, column in _dots(scaled, line.style == "line"):
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
    return "\n".join([*chart, *_x_axis(panel, x_low, x_high, margin, columns), *legend])


def in_encoding(chart: str, encoding: str) -> str:
    """Return a chart of `text_chart`, translated to ASCII if the encoding has no braille.

    Args:
        chart: the text.
        encoding: its target (``sys.stdout.encoding``).
    """
    try:
        chart.encode(encoding)
    except UnicodeEncodeError:
        return chart.translate(_IN_ASCII)
    return chart


def _mark(line: Line, place: int, has_letters: bool) -> str:
    """Return the character that a line is drawn with, an empty one for braille."""
    if not has_letters:
        return "o" if line.style == "markers" or len(line.y) == 1 else ""
    letter = chr(ord("a") + place % 26)
    return letter.upper() if line.style == "markers" else letter


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest value, or room on either side of a single one."""
    low, high = min(values), max(values)
    room = max(abs(low) / 10, float(low == 0 or abs(low) >= 1))
    return (low - room, high + room) if high - low <= 1e-9 * abs(high) else (low, high)


def _dots(points: Sequence[tuple[float, float]], is_joined: bool) -> Iterator[tuple[int, int]]:
    """Yield the (row, column) of each dot of points and, if they are joined, of the lines between neighbours."""
    before = (math.nan, math.nan)
    for point in points:
        if not math.isnan(point[0]):
            start = before if is_joined and not math.isnan(before[0]) else point
            steps = max(1, math.ceil(max(abs(b - a) for a, b in zip(start, point, strict=True))))
            for step in range(steps + 1):
                row, column = (round(a + (b - a) * step / steps) for a, b in zip(start, point, strict=True))
                yield row, column
        before = point


def _x_axis(panel: Panel, low: float, high: float, margin: int, columns: int) -> tuple[str, str]:
    """Return two rows: the axis with its label at the end, and the numbers below its ticks."""
    axis, numbers = ["\u2500"] * columns, [" "] * (margin + 1 + columns)
    end = 0
    for at in ticks(low, high, max(2, columns // 10)):
        if panel.has_whole_x and abs(at - round(at)) > 1e-9:
            continue
        column, text = round((at - low) / (high - low) * (columns - 1)), readable(at)
        start = min(max(margin + 1 + column - len(text) // 2, 0), len(numbers) - len(text))
        if start >= end:
            axis[column] = "\u252c"
            numbers[start : start + len(text)] = text
            end = start + len(text) + 1
    label = panel.x_label and f" {panel.x_label}"
    return f"{'':>{margin}}\u2514{''.join(axis[: columns - len(label)])}{label}", "".join(numbers).rstrip()


def _legend(entries: Sequence[tuple[str, str, int]], width: int, colour: bool) -> list[str]:
    """Return rows of marks and labels.

    Args:
        entries: mark, label and place in the palette of each line or part.
        width: columns of a row at most.
        colour: paint each entry in its colour.
    """
    rows: list[str] = []
    used = width
    for mark, label, place in entries:
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
