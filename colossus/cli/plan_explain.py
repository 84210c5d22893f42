"""``colossus plan --explain``: a plan's timeline, memory and hosts, and why it beats the next plan. No torch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from colossus.arithmetic import aligned, counted
from colossus.cli.memory_table import stage_table
from colossus.cli.plan_table import Question, axis_rows, launch_lines, memory_rows, part_rows, plan_words
from colossus.compare.printed_rows import seconds_text
from colossus.context.grid import PUBLIC_NAMES, RankGrid, build_grid
from colossus.hardware.host_placement import Placement
from colossus.planner.plan_estimate import PlanEstimate
from colossus.schedule.actions import COMPUTE
from colossus.schedule.draw import draw
from colossus.schedule.simulate import Simulation, Span

#: the most parts in the comparison of two plans
_MOST_PARTS = 4
#: smallest difference between two plans that is printed, as a fraction of a step
_LEAST = 1e-4


def render_plan(question: Question, plans: Sequence[PlanEstimate], at: int, width: int) -> str:
    """Return the explanation of a plan.

    Args:
        question: the question that the plans answer.
        plans: the list, the best first.
        at: index of the plan.
        width: columns at most.
    """
    plan = plans[at]
    words = f"plan {at + 1} of {len(plans)}, {seconds_text(plan.seconds)} a step: "
    title = textwrap.fill(words + plan_words(plan.config), width, subsequent_indent="  ")
    sections = [
        title,
        _timeline(plan, width),
        part_rows(plan),
        memory_rows("memory", question, plan),
    ]
    if len(plan.memory.ranks) > 1:
        sections.append(stage_table(plan.memory.ranks))
    sections += [f"note        {note}" for note in plan.memory.notes]
    if plan.axes:
        sections.append(axis_rows(plan))
    sections += [host_rows(build_grid(plan.config.parallel), question.hosts), launch_lines(question, plan, width)]
    if at + 1 < len(plans):
        why = f"why         {_beats(question, plan, plans[at + 1], at + 2)}"
        sections.append(textwrap.fill(why, width, subsequent_indent="  "))
    return "\n\n".join(sections)


def _timeline(plan: PlanEstimate, width: int) -> str:
    """Return the timeline of a plan's microbatches, or of the first: with three for each rank a pipeline has been full.

    It ends with the last one that is shown: reductions and the optimizer's step have no microbatch.
    """
    total = plan.config.schedule.microbatches
    shown = min(total, 3 * len(plan.spans))
    part = f", of the first {shown} microbatches of {total}" if shown < total else ""
    drawn = [[s for s in own if s.action.kind in COMPUTE and s.action.microbatch < shown] for own in plan.spans]
    milliseconds = Simulation([[Span(s.action, 1e3 * s.start, 1e3 * s.end) for s in own] for own in drawn])
    return f"timeline    milliseconds{part}\n{draw(milliseconds, width)}"


def host_rows(grid: RankGrid, hosts: int) -> str:
    """Return a table of the hosts that the groups of each axis span."""
    placement = Placement(grid, hosts)
    ranks = placement.ranks_per_host
    if hosts == 1:
        return f"hosts       one host has all {counted(ranks, 'rank')}"
    axes = dict.fromkeys(name for public in PUBLIC_NAMES for name in (public, *grid.public[public]))
    rows = []
    for name in axes:
        if grid.size(name) > 1:
            spread = placement.of(name)
            where = "inside a host" if spread.hosts == 1 else f"over {spread.hosts} hosts"
            rows.append((name, counted(spread.ranks, "rank"), where))
    return (
        f"hosts       {hosts} of {counted(ranks, 'rank')}; `colossus show` prints the coordinates of each rank\n"
        f"{textwrap.indent(aligned(rows, left_columns=(0, 2)), '  ')}"
    )


def _beats(question: Question, plan: PlanEstimate, following: PlanEstimate, place: int) -> str:
    """Say by how much a plan is faster than the next of the list, and in which parts of a step they differ most."""
    saved = following.seconds - plan.seconds
    parts = dict.fromkeys([*plan.parts, *following.parts])
    changes = {part: plan.parts.get(part, 0.0) - following.parts.get(part, 0.0) for part in parts}
    largest = sorted(parts, key=lambda part: -abs(changes[part]))[:_MOST_PARTS]
    words = [
        f"{part} {'-' if changes[part] < 0 else '+'}{seconds_text(abs(changes[part]))}"
        for part in largest
        if abs(changes[part]) > _LEAST * plan.seconds
    ]
    return (
        f"{seconds_text(saved)} ({100 * saved / following.seconds:.1f} %) less per step than plan {place}, "
        f"{plan_words(following.config)}{': ' * bool(words)}{', '.join(words)}"
    )
