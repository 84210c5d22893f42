"""A simulated schedule as lines of text, or as a picture. No torch."""

from __future__ import annotations

from pathlib import Path

from colossus.picture import check_picture, new_figure
from colossus.schedule.actions import COMPUTE, Action
from colossus.schedule.simulate import Simulation, Span

#: kind -> (letter, what fills the rest of its cell)
_LETTERS = {"forward": ("F", "-"), "backward": ("B", "="), "backward_input": ("B", "="), "backward_weight": ("W", "~")}
_IDLE = "."
#: a short schedule is stretched until its shortest action has this many columns, and no further
_WIDEST = 6


def draw(simulation: Simulation, width: int = 100) -> str:
    """The rows, a scale in the simulation's unit of time, and what the letters mean.

    A cell starts with its letter and the number of its microbatch: capital letters are the first, third, ... stage of
    the rank, small ones the second, fourth, ... Where cells would be too narrow for numbers, each column has the letter
    of what runs then.

    Args:
        width: columns of the whole; at least 20 are used.
    """
    chunk = _chunks(simulation)
    labels = [f"rank {rank}  " for rank in range(len(simulation.spans))]
    margin = max(map(len, labels))
    available = max(20, width) - margin
    computed = [[span for span in own if span.action.kind in COMPUTE] for own in simulation.spans]
    columns, numbered = _scale(simulation, computed, available)
    rows = [_row(own, chunk, columns, simulation.makespan, numbered) for own in computed]
    lines = [f"{label:<{margin}}{row}" for label, row in zip(labels, rows, strict=True)]
    end = round(columns * simulation.makespan)
    scale = f"{'time':<{margin}}0{f'{simulation.makespan:g}':>{max(1, end - 1)}}"
    return "\n".join([*lines, scale, _legend(simulation, chunk, numbered)])


def _chunks(simulation: Simulation) -> dict[int, int]:
    """Stage -> its place among the stages of its rank."""
    out: dict[int, int] = {}
    for own in simulation.spans:
        stages = sorted({span.action.stage for span in own if span.action.kind in COMPUTE})
        out.update({stage: place for place, stage in enumerate(stages)})
    return out


def _label(action: Action, chunk: dict[int, int]) -> str:
    letter = _LETTERS[action.kind][0]
    return f"{letter.lower() if chunk[action.stage] % 2 else letter}{action.microbatch}"


def _scale(simulation: Simulation, computed: list[list[Span]], available: int) -> tuple[float, bool]:
    """Columns per unit of time, and whether every cell has room for its number."""
    spans = [span for own in computed for span in own if span.end > span.start]
    if not spans:
        return 0.0, False
    shortest = min(span.end - span.start for span in spans)
    needed = max(len(str(span.action.microbatch)) + 1 for span in spans)
    even = int(available * shortest / simulation.makespan + 1e-9)
    if even >= needed:
        return min(even, max(_WIDEST, needed)) / shortest, True
    return available / simulation.makespan, False


def _row(own: list[Span], chunk: dict[int, int], columns: float, makespan: float, numbered: bool) -> str:
    row = [_IDLE] * round(columns * makespan)
    for span in own:
        label, fill = _label(span.action, chunk), _LETTERS[span.action.kind][1]
        if numbered:
            start, stop = round(columns * span.start), round(columns * span.end)
            row[start:stop] = f"{label:{fill}<{stop - start}}"[: stop - start]
        else:  # the columns whose middle is in the span
            for column in range(round(columns * span.start), round(columns * span.end)):
                row[column] = label[0]
    return "".join(row)


def _legend(simulation: Simulation, chunk: dict[int, int], numbered: bool) -> str:
    kinds = {span.action.kind for own in simulation.spans for span in own}
    entries = ["F forward"]
    if "backward" in kinds:
        entries.append("B backward")
    if "backward_input" in kinds:
        entries += ["B backward of inputs", "W backward of weights"]
    entries.append(f"{_IDLE} idle")
    if max(chunk.values()) > 0:
        entries.append("capitals: a rank's 1st, 3rd ... stage, small: its 2nd, 4th ...")
    if not numbered:
        entries.append("too narrow for numbers of microbatches")
    return "; ".join(entries)


def summary(simulation: Simulation) -> str:
    """Makespan, bubble and, for each rank, its bubble and the most activations it holds."""
    lines = [
        f"makespan {simulation.makespan:g}, bubble {100 * simulation.bubble:.1f} %",
        "",
        "rank  bubble  peak in flight",
    ]
    for rank, (bubble, peak) in enumerate(zip(simulation.bubbles, simulation.peaks, strict=True)):
        lines.append(f"{rank:>4}  {100 * bubble:>4.1f} %  {peak:>14}")
    return "\n".join(lines)


#: kind -> (name, colour, hatch); the hatch tells them apart in print without colours
_BARS = {
    "forward": ("forward", "#9ecae1", ""),
    "backward": ("backward", "#fdae6b", "//"),
    "backward_input": ("backward of inputs", "#fdae6b", "//"),
    "backward_weight": ("backward of weights", "#a1d99b", ".."),
}


def save(simulation: Simulation, path: str | Path, title: str) -> None:
    """Draw the timeline of each rank.

    Raises:
        ValueError: when the file's ending is none of `FORMATS`, its folder is not there, or matplotlib is not.
    """
    path = Path(path)
    check_picture(path)
    ranks = len(simulation.spans)
    figure = new_figure(12, 1.6 + 0.4 * ranks)
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("time, in forwards of a rank")
    axes.set_xlim(0, simulation.makespan)
    named: set[str] = set()
    for rank, own in enumerate(simulation.spans):
        stages = sorted({span.action.stage for span in own if span.action.kind in COMPUTE})
        for span in own:
            action = span.action
            if action.kind not in COMPUTE:
                continue
            name, colour, hatch = _BARS[action.kind]
            axes.barh(
                rank,
                span.end - span.start,
                left=span.start,
                height=0.9,
                color=colour,
                hatch=hatch,
                # later stages of a rank are paler
                alpha=1.0 / (1 + stages.index(action.stage)) ** 0.5,
                edgecolor="white",
                linewidth=0.5,
                label=None if name in named else name,
            )
            named.add(name)
            axes.text((span.start + span.end) / 2, rank, str(action.microbatch), ha="center", va="center", fontsize=6)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.invert_yaxis()
    axes.legend(fontsize=7, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4)
    figure.savefig(path)
