"""``colossus show --memory``: how much memory the ranks of a plan need, and what makes one fit that does not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from colossus.arithmetic import aligned, byte_count, counted
from colossus.cli.memory_table import fullest_rank, kind_table, memory_as_json, stage_table
from colossus.config import Config, ConfigError
from colossus.config.plans import describe_plan
from colossus.planner.memory import predict_memory
from colossus.planner.rank_memory import PlanMemory
from colossus.planner.remedies import remedies


def render_memory(
    config: Config, load: Callable[[Sequence[str]], Config], limit: int | None = None, *, as_json: bool = False
) -> str:
    """The memory of a resolved config's plan, as text or as JSON.

    Args:
        load: the same config with overrides on top.
        limit: bytes of a device: where the plan needs more, changes are tried.

    Raises:
        ConfigError: see `predict_memory`.
    """
    plan = predict_memory(config)
    tried = _tried(config, load) if limit is not None and plan.fullest.total > limit else []
    if as_json:
        return json.dumps(_as_json(config, plan, limit, tried), indent=1)
    fullest = plan.fullest
    head = [
        str(config.name),
        f"plan        {describe_plan(config)}",
        f"memory      {byte_count(fullest.total)} on {fullest_rank(plan)}, predicted",
    ]
    if limit is not None:
        left = limit - fullest.total
        fits = f"fits, {byte_count(left)} are left" if left >= 0 else f"does not fit, {byte_count(-left)} are missing"
        head.append(f"limit       {byte_count(limit)}: {fits}")
    head += [f"note        {note}" for note in plan.notes]
    sections = ["\n".join(head), kind_table(fullest)]
    if len(plan.ranks) > 1:
        sections.append(stage_table(plan.ranks))
    if tried:
        sections.append(_remedy_table(tried, limit or 0))
    return "\n\n".join(sections)


def _tried(config: Config, load: Callable[[Sequence[str]], Config]) -> list[tuple[tuple[str, ...], int]]:
    """Changes that are possible, each with the memory of the fullest rank; those that need more are left out."""
    found = []
    for changes in remedies(config):
        try:
            found.append((changes, predict_memory(load(changes)).fullest.total))
        except ConfigError:  # of a plan that has none of it
            continue
    return found


def _remedy_table(tried: Sequence[tuple[tuple[str, ...], int]], most: int) -> str:
    rows = [("with", "total", "")]
    rows += [(" ".join(changes), byte_count(total), "fits" if total <= most else "") for changes, total in tried]
    table = aligned(rows, left=(0, 2))
    if not any(total <= most for _, total in tried):
        number = counted(len(tried), "change")
        table += f"\n\nnone of these {number} is enough: take more ranks for tensor or pipeline, or a smaller model"
    return table


def _as_json(
    config: Config, plan: PlanMemory, limit: int | None, tried: Sequence[tuple[tuple[str, ...], int]]
) -> dict[str, Any]:
    found = {"plan": describe_plan(config), **memory_as_json(plan)}
    if limit is not None:
        found |= {"limit": limit, "fits": plan.fullest.total <= limit}
        found["remedies"] = [{"overrides": changes, "total": total} for changes, total in tried]
    return found
