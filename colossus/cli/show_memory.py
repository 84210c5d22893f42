"""``colossus show --memory``: the predicted memory of a plan's ranks."""

from __future__ import annotations

import json

from colossus.arithmetic import byte_count
from colossus.cli.memory_table import kind_table, memory_as_json, stage_table
from colossus.config import Config
from colossus.config.plan_head import as_lines, plan_head
from colossus.config.plans import describe_plan
from colossus.planner.memory import predict_memory


def render_memory(config: Config, limit: int | None = None, *, as_json: bool = False) -> str:
    """Return the memory of a resolved config's plan, as text or as JSON.

    Args:
        config: the config.
        limit: bytes of a device; the text says whether the plan fits them.
        as_json: whether to return JSON.

    Raises:
        ConfigError: see `predict_memory`.
    """
    plan = predict_memory(config, on_cpu=config.device == "cpu")
    fullest = plan.fullest
    if as_json:
        numbers = {"plan": describe_plan(config), **memory_as_json(plan)}
        if limit is not None:
            numbers |= {"limit": limit, "fits": fullest.total <= limit}
        return json.dumps(numbers, indent=1)
    head = {
        "plan": plan_head(config)["plan"],
        "memory": f"{byte_count(fullest.total)} on {plan.fullest_rank}, predicted",
    }
    if limit is not None:
        free = limit - fullest.total
        fits = f"fits, {byte_count(free)} are left" if free >= 0 else f"does not fit, {byte_count(-free)} are missing"
        head["limit"] = f"{byte_count(limit)}: {fits}"
        if free < 0:
            size = byte_count(limit).replace(" ", "")
            head[""] = f"`colossus plan --memory {size}` finds plans that fit"
    notes = [("note", note) for note in plan.notes]
    sections = [f"{config.name}\n{as_lines([*head.items(), *notes])}", kind_table(fullest)]
    if len(plan.ranks) > 1:
        sections.append(stage_table(plan.ranks))
    return "\n\n".join(sections)
