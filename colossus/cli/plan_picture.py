"""Pictures of ``colossus plan``: of the best plans beside each other, and of one with its timeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from colossus.chart import Bars, save_charts
from colossus.chart.draw_picture import draw_bars
from colossus.cli.plan_table import Question, plan_words
from colossus.config.plans import describe_sizes
from colossus.picture import new_figure
from colossus.planner.plan_estimate import PlanEstimate
from colossus.planner.rank_memory import RankMemory
from colossus.schedule.draw import draw_picture
from colossus.schedule.simulate import Simulation


def save_plans(question: Question, plans: Sequence[PlanEstimate], path: Path) -> None:
    """The parts of a step and the memory of each plan.

    Raises:
        ValueError: see `save_charts`.
    """
    names = [f"{rank}  {describe_sizes(plan.config.parallel)}" for rank, plan in enumerate(plans, start=1)]
    save_charts([part_bars(plans, names), memory_bars(question, plans, names)], path)


def save_plan(question: Question, plan: PlanEstimate, timeline: Simulation, path: Path) -> None:
    """The timeline of a plan in milliseconds, the parts of a step, the memory of its fullest rank."""
    ranks = len(timeline.spans)
    figure = new_figure(12, 4.6 + 0.4 * ranks)
    whole = figure.add_gridspec(2, 2, height_ratios=(0.8 + 0.4 * ranks, 2.4))
    title = plan_words(plan.config, question.config)
    draw_picture(figure.add_subplot(whole[0, :]), timeline, title, "milliseconds")
    for column, bars in enumerate((part_bars([plan], [""]), memory_bars(question, [plan], [""]))):
        axes = figure.add_subplot(whole[1, column])
        handles = draw_bars(axes, bars)
        axes.set_title(bars.title, loc="left", fontsize=10)
        axes.set_xlabel(bars.x_label)
        place = dict(loc="upper left", bbox_to_anchor=(0.0, -0.22), ncols=3)
        axes.legend(handles.values(), handles.keys(), fontsize=8, frameon=False, **place)
    figure.savefig(path, dpi=150)


def part_bars(plans: Sequence[PlanEstimate], names: Sequence[str]) -> Bars:
    """Where the time of a step goes."""
    parts = dict.fromkeys(part for plan in plans for part, seconds in plan.parts.items() if seconds)
    sizes = {part: [1e3 * plan.parts.get(part, 0.0) for plan in plans] for part in parts}
    return Bars("a step of the rank that is busy longest", names, sizes, "milliseconds")


def memory_bars(question: Question, plans: Sequence[PlanEstimate], names: Sequence[str]) -> Bars:
    """What the fullest rank holds on its device, and how much there is."""
    kinds = [_on_device(plan.memory.fullest) for plan in plans]
    every = dict.fromkeys(kind for own in kinds for kind, size in own.items() if size)
    sizes = {kind: [own.get(kind, 0) / 1e9 for own in kinds] for kind in every}
    limit = f"limit {question.memory / 1e9:.4g} GB", question.memory / 1e9
    return Bars("memory of the fullest rank", names, sizes, "GB", limit)


def _on_device(rank: RankMemory) -> dict[str, int]:
    """By kind without what is on the host: first of the optimizer's state, then of what else may be there."""
    sizes = dict(rank.kinds)
    on_host = -sizes.pop("on the host")
    for kind in ("optimizer", "weights", "gradients"):
        taken = min(on_host, sizes[kind])
        sizes[kind] -= taken
        on_host -= taken
    return sizes
