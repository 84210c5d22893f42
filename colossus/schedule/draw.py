"""A simulated schedule as lines of text, or as a picture. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from colossus.picture import check_picture, new_figure
from colossus.schedule.actions import COMPUTE
from colossus.schedule.simulate import Simulation, Span

#: kind -> (letter, character that fills the rest of its cell, name, colour)
_KINDS = {
    "forward": ("F", "-", "forward", "#9ecae1"),
    "backward": ("B", "=", "backward", "#fdae6b"),
    "backward_input": ("B", "=", "backward of inputs", "#fdae6b"),
    "backward_weight": ("W", "~", "backward of weights", "#a1d99b"),
}
_IDLE = "."
#: a short schedule is stretched until its shortest action has this many columns
_WIDEST = 6
#: numbers of microbatches that have room beside each other in a picture
_NUMBERS_IN_PICTURE = 150


def draw(simulation: Simulation, width: int = 100) -> str:
    """Return one row per rank, a time scale in the simulation's unit, and a legend of the letters.

    A cell starts with its letter and the number of its microbatch. Capital letters are the first, third, ... stage of
    the rank, small ones the second, fourth, ... Where cells are too narrow for numbers, each column has the letter of
    the action that runs then.

    Args:
        simulation: the schedule.
        width: the columns of the text, at least 20.
    """
    computed = _computed(simulation)
    margin = len(f"rank {len(computed) - 1}  ")
    columns, is_numbered = _scale(simulation.makespan, computed, max(20, width) - margin)
    lines = []
    kinds, has_chunks = set(), False
    for rank, own in enumerate(computed):
        stages = sorted({span.action.stage for span in own})
        has_chunks |= len(stages) > 1
        row = [_IDLE] * round(columns * simulation.makespan)
        for span in own:
            letter, fill, _, _ = _KINDS[span.action.kind]
            kinds.add(span.action.kind)
            letter = letter.lower() if stages.index(span.action.stage) % 2 else letter
            start, stop = round(columns * span.start), round(columns * span.end)
            cell = f"{letter}{span.action.microbatch}".ljust(stop - start, fill) if is_numbered else letter * len(row)
            row[start:stop] = cell[: stop - start]
        lines.append(f"{f'rank {rank}':<{margin}}{''.join(row)}")
    end = max(1, round(columns * simulation.makespan) - 1)
    lines.append(f"{'time':<{margin}}0{f'{simulation.makespan:g}':>{end}}")
    legend = [f"{letter} {name}" for kind, (letter, _, name, _) in _KINDS.items() if kind in kinds]
    legend += [f"{_IDLE} idle", *["capitals: a rank's 1st, 3rd ... stage, small: its 2nd, 4th ..."] * has_chunks]
    return "\n".join([*lines, "; ".join(legend)])


def _computed(simulation: Simulation) -> list[list[Span]]:
    return [[span for span in own if span.action.kind in COMPUTE] for own in simulation.spans]


def _scale(makespan: float, computed: list[list[Span]], available: int) -> tuple[float, bool]:
    """Return the columns per unit of time, and whether every cell has room for its number."""
    spans = [span for own in computed for span in own]
    shortest = min(span.end - span.start for span in spans)
    needed = max(len(str(span.action.microbatch)) + 1 for span in spans)
    even = int(available * shortest / makespan + 1e-9)
    if even >= needed:
        return min(even, max(_WIDEST, needed)) / shortest, True
    return available / makespan, False


def summary(simulation: Simulation) -> str:
    """Return the makespan, the bubble and, for each rank, its bubble and its peak of activations in flight."""
    lines = [
        f"makespan {simulation.makespan:g}, bubble {100 * simulation.bubble:.1f} %",
        "",
        "rank  bubble  peak in flight",
    ]
    for rank, (bubble, peak) in enumerate(zip(simulation.bubbles, simulation.peaks, strict=True)):
        lines.append(f"{rank:>4}  {100 * bubble:>4.1f} %  {peak:>14}")
    return "\n".join(lines)


def save(simulation: Simulation, path: str | Path, title: str) -> None:
    """Draw the timeline of each rank into a file.

    Raises:
        ValueError: the file's ending is none of `FORMATS`, or its folder or matplotlib is missing.
    """
    path = Path(path)
    check_picture(path)
    figure = new_figure(12, 1.6 + 0.4 * len(simulation.spans))
    draw_picture(figure.subplots(), simulation, title, "time, in forwards of a rank")
    figure.savefig(path)


def draw_picture(axes: Any, simulation: Simulation, title: str, x_label: str) -> None:
    """Draw the timeline of each rank into axes of matplotlib."""
    ranks, number_width = len(simulation.spans), simulation.makespan / _NUMBERS_IN_PICTURE
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x_label)
    axes.set_xlim(0, simulation.makespan)
    for rank, own in enumerate(_computed(simulation)):
        stages = sorted({span.action.stage for span in own})
        for span in own:
            width = span.end - span.start
            paler = 1.0 / (1 + stages.index(span.action.stage)) ** 0.5  # later stages of a rank
            colour = _KINDS[span.action.kind][3]
            axes.barh(rank, width, left=span.start, height=0.9, color=colour, alpha=paler, edgecolor="white")
            if width >= number_width:
                number = str(span.action.microbatch)
                axes.text(span.start + width / 2, rank, number, ha="center", va="center", fontsize=6)
    for _, _, name, colour in _KINDS.values():
        axes.barh(0, 0, color=colour, label=name)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.invert_yaxis()
    axes.legend(fontsize=7, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4)
