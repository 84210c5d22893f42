"""Pictures for ``colossus plan``: the best plans side by side, or one plan with its timeline."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colossus.arithmetic import byte_count, parse_bytes
from colossus.chart import Bars
from colossus.chart.draw_picture import draw_bars
from colossus.cli.plan_table import Question, plan_words
from colossus.picture import new_figure
from colossus.planner.plan_estimate import PlanEstimate
from colossus.planner.rank_memory import RankMemory
from colossus.schedule.draw import draw_picture
from colossus.schedule.simulate import Simulation

#: the most letters of a plan beside its bar
_LONGEST = 60


def save_plans(question: Question, plans: Sequence[PlanEstimate], path: Path) -> None:
    """Draw the parts of a step and the memory of each plan into a file."""
    words = [f"{rank}  {plan_words(plan.config)}" for rank, plan in enumerate(plans, start=1)]
    names = [textwrap.shorten(name, _LONGEST, placeholder=" ..") for name in words]
    figure = new_figure(12, 2.6 + 0.5 * max(3, len(plans)))
    for axes, bars in zip(figure.subplots(2, 1), _both(question, plans, names), strict=True):
        _draw(axes, bars)
    figure.savefig(path, dpi=150)


def save_plan(question: Question, plan: PlanEstimate, timeline: Simulation, title: str, path: Path) -> None:
    """Draw the timeline of a plan, the parts of a step, and the memory of its fullest rank into a file.

    Args:
        question: the question that the plan answers.
        plan: the plan.
        timeline: its timeline, in the unit that ``title`` names.
        title: label of the timeline's time axis.
        path: the file.
    """
    ranks = len(timeline.spans)
    figure = new_figure(12, 4.6 + 0.4 * ranks)
    places = figure.add_gridspec(3, 1, height_ratios=(1.0 + 0.4 * ranks, 1.0, 1.0))
    figure.suptitle(textwrap.shorten(plan_words(plan.config), 140, placeholder=" .."), fontsize=10)
    draw_picture(figure.add_subplot(places[0]), timeline, "timeline", title)
    for place, bars in enumerate(_both(question, [plan], [""]), start=1):
        _draw(figure.add_subplot(places[place]), bars)
    figure.savefig(path, dpi=150)


def _both(question: Question, plans: Sequence[PlanEstimate], names: Sequence[str]) -> tuple[Bars, Bars]:
    return part_bars(plans, names), memory_bars(question, plans, names)


def _draw(axes: Any, bars: Bars) -> None:
    """Draw bars, with their legend to the right."""
    handles = draw_bars(axes, bars)
    axes.set_title(f"{bars.title} ({bars.x_label})", loc="left", fontsize=10)
    axes.tick_params(labelsize=8)
    axes.set_ylim(len(bars.names) - 0.5, -0.5)
    place = dict(loc="upper left", bbox_to_anchor=(1.01, 1.0))
    axes.legend(handles.values(), handles.keys(), fontsize=8, frameon=False, **place)


def part_bars(plans: Sequence[PlanEstimate], names: Sequence[str]) -> Bars:
    """Return bars of each plan's step by part, computation first and the bubble last."""
    parts = {part for plan in plans for part, seconds in plan.parts.items() if seconds}
    computed = [part for part in ("forward", "backward", "recomputation", "optimizer") if part in parts]
    ordered = [*computed, *sorted(parts - {*computed, "bubble"}), *sorted(parts & {"bubble"})]
    sizes = {part: [1e3 * plan.parts.get(part, 0.0) for plan in plans] for part in ordered}
    return Bars("a step of the rank that is busy longest", names, sizes, "milliseconds")


def memory_bars(question: Question, plans: Sequence[PlanEstimate], names: Sequence[str]) -> Bars:
    """Return bars of the device memory of each plan's fullest rank by kind, with the limit of a device."""
    kinds = [_on_device(plan.memory.fullest) for plan in plans]
    most = max(sum(own.values()) for own in kinds)
    unit = byte_count(most).split()[1]
    scale = parse_bytes(f"1 {unit}")
    shown = dict.fromkeys(kind for own in kinds for kind, size in own.items() if size)
    sizes = {kind: [own.get(kind, 0) / scale for own in kinds] for kind in shown}
    limit = None  # a limit far above the bars would leave them without length
    if question.memory < 10 * most:
        limit = f"limit {byte_count(question.memory)}", question.memory / scale
    return Bars("memory of the fullest rank", names, sizes, unit, limit)


def _on_device(rank: RankMemory) -> dict[str, int]:
    """Return bytes on the device by kind: the host takes optimizer state first, then weights, then gradients."""
    sizes = dict(rank.kinds)
    on_host = -sizes.pop("on the host")
    for kind in ("optimizer", "weights", "gradients"):
        taken = min(on_host, sizes[kind])
        sizes[kind] -= taken
        on_host -= taken
    return sizes
