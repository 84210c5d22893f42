"""A graph as a picture: a circle of replicas for each step, an arrow for each message. Plain SVG, no matplotlib."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from colossus.graphs.graph import Phase, StepGraph

_SIDE, _GAP, _TOP, _RADIUS = 220, 16, 44, 78
_COLOURS = ("#2171b5", "#d94801", "#238b45", "#6a51a3")


def save(phases: list[Phase], path: str | Path, title: str, most_steps: int = 24) -> None:
    """Draw the first ``most_steps`` steps of the period of each phase.

    Raises:
        ValueError: when the file does not end with ``.svg``, or its folder is not there.
    """
    path = Path(path)
    if path.suffix.lower() != ".svg":
        raise ValueError(f"{path}: the picture ends with .svg")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: no folder {path.parent}")
    path.write_text(picture(phases, title, most_steps))


def picture(phases: list[Phase], title: str, most_steps: int = 24) -> str:
    """The text of the SVG."""
    panels = [
        (f"from step {phase.start}: " if len(phases) > 1 else "") + f"step {number} of {phase.period}"
        for phase in phases
        for number in range(min(phase.period, most_steps))
    ]
    steps = [step for phase in phases for step in phase.steps[:most_steps]]
    columns = min(len(steps), 4)
    rows = -(-len(steps) // columns)
    width, height = columns * (_SIDE + _GAP) + _GAP, _TOP + rows * (_SIDE + _GAP)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_GAP}" y="26" font-size="14">{escape(title)}</text>',
        "<defs>",
        *(
            f'<marker id="head{number}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{colour}"/></marker>'
            for number, colour in enumerate(_COLOURS)
        ),
        "</defs>",
    ]
    for number, (step, name) in enumerate(zip(steps, panels, strict=True)):
        x, y = _GAP + number % columns * (_SIDE + _GAP), _TOP + number // columns * (_SIDE + _GAP)
        out += [f'<g transform="translate({x},{y})">', *_panel(step, name), "</g>"]
    return "\n".join([*out, "</svg>"]) + "\n"


def _panel(step: StepGraph, name: str) -> list[str]:
    replicas = len(step.matrix)
    node = min(11.0, math.pi * _RADIUS / replicas * 0.8)
    centre = (_SIDE / 2, _SIDE / 2 + 6)
    angles = [2 * math.pi * index / replicas - math.pi / 2 for index in range(replicas)]
    places = [(centre[0] + _RADIUS * math.cos(angle), centre[1] + _RADIUS * math.sin(angle)) for angle in angles]
    out = [f'<text x="{centre[0]}" y="12" font-size="11" text-anchor="middle" fill="#555">{escape(name)}</text>']
    weights = sorted({round(weight, 9) for index in range(replicas) for _, weight in step.targets(index)}, reverse=True)
    for source in range(replicas):
        for to, weight in step.targets(source):
            colour = weights.index(round(weight, 9)) % len(_COLOURS)
            (x1, y1), (x2, y2) = _between(places[source], places[to], node)
            bend = 0.12 if step.matrix[source, to] else 0.0  # two arrows between a pair lie beside each other
            mx, my = (x1 + x2) / 2 - bend * (y2 - y1), (y1 + y2) / 2 + bend * (x2 - x1)
            out.append(
                f'<path d="M{x1:.1f},{y1:.1f} Q{mx:.1f},{my:.1f} {x2:.1f},{y2:.1f}" fill="none" '
                f'stroke="{_COLOURS[colour]}" stroke-width="1.2" marker-end="url(#head{colour})">'
                f"<title>{source} to {to}: {weight:.4g}</title></path>"
            )
    for index, (x, y) in enumerate(places):
        out.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{node:.1f}" fill="#deebf7" stroke="#555">'
            f"<title>{index} keeps {step.keeps(index):.4g}</title></circle>"
        )
        if node >= 6:
            out.append(f'<text x="{x:.1f}" y="{y + 3.5:.1f}" font-size="10" text-anchor="middle">{index}</text>')
    return out


def _between(
    one: tuple[float, float], other: tuple[float, float], node: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """The line from one node to another, without what lies inside of the two."""
    dx, dy = other[0] - one[0], other[1] - one[1]
    length = math.hypot(dx, dy)
    ux, uy = dx / length * node, dy / length * node
    return (one[0] + ux, one[1] + uy), (other[0] - ux, other[1] - uy)
