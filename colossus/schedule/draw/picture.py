"""A simulated schedule as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from colossus.picture import check_picture, new_figure
from colossus.schedule.actions import COMPUTE
from colossus.schedule.simulate import Simulation

#: kind -> (colour, hatch); the hatch tells them apart in print without colours
_STYLE = {
    "forward": ("#9ecae1", ""),
    "backward": ("#fdae6b", "//"),
    "backward_input": ("#fdae6b", "//"),
    "backward_weight": ("#a1d99b", ".."),
}
_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward of inputs",
    "backward_weight": "backward of weights",
}


def save(simulation: Simulation, path: str | Path, title: str) -> None:
    """Draw the timeline of each rank above the activations it holds.

    Raises:
        ValueError: when the file's ending is none of `FORMATS`, its folder is not there, or matplotlib is not.
    """
    path = Path(path)
    check_picture(path)
    ranks = len(simulation.spans)
    figure = new_figure(12, 1.6 + 0.7 * ranks)
    rows, memory = figure.subplots(2, 1, sharex=True, height_ratios=(ranks, max(1.0, ranks / 2)))
    rows.set_title(title, loc="left", fontsize=10)
    _rows(rows, simulation)
    for rank, curve in enumerate(simulation.memory):
        times = [time for time, _ in curve] + [simulation.makespan]
        held = [number for _, number in curve]
        memory.step(times, [*held, held[-1]], where="post", label=f"rank {rank}", linewidth=1)
    memory.set_ylabel("in flight")
    memory.set_xlabel("time, in forwards of a rank")
    memory.set_xlim(0, simulation.makespan)
    memory.yaxis.get_major_locator().set_params(integer=True)
    memory.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), ncols=-(-ranks // 8))
    figure.savefig(path)


def _rows(rows: Any, simulation: Simulation) -> None:
    ranks = len(simulation.spans)
    named: set[str] = set()
    for rank, own in enumerate(simulation.spans):
        stages = sorted({span.action.stage for span in own if span.action.kind in COMPUTE})
        for span in own:
            action = span.action
            if action.kind not in COMPUTE:
                continue
            colour, hatch = _STYLE[action.kind]
            name = _NAMES[action.kind]
            rows.barh(
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
            rows.text((span.start + span.end) / 2, rank, str(action.microbatch), ha="center", va="center", fontsize=6)
    rows.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    rows.invert_yaxis()
    rows.legend(fontsize=7, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4)
