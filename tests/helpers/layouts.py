"""The facts of a model under a layout, found in a world as small as the layout allows."""

from __future__ import annotations

from typing import Any

from helpers.training import batch_of

from colossus.config import load_config
from colossus.planner.fake_rank import fake_rank
from colossus.planner.memory import LayoutFacts, layout_facts


def world_of(plan: dict[str, Any]) -> int:
    def size(key: str) -> int:
        section = plan.get(key, 1)
        return int(section.get("size", 1) if isinstance(section, dict) else section)

    return size("data") * size("pipeline") * size("tensor") * size("sequence")


def facts_of_layout(config: dict[str, Any]) -> LayoutFacts:
    """Of the layout of a plan: without pipeline and ZeRO, and without other data ranks than experts need."""
    plan, samples = config["parallel"], config["train"]["global_batch_size"] // config["parallel"].get("data", 1)
    layout = {key: value for key, value in plan.items() if key in ("tensor", "sequence", "expert")}
    if "expert" in plan:
        layout["data"] = plan["expert"]
    train = {**config["train"], "global_batch_size": samples * layout.get("data", 1)}
    schedule = {"microbatches": config.get("schedule", {}).get("microbatches", 1)}
    resolved = load_config({**config, "parallel": layout, "train": train, "schedule": schedule}, nproc=world_of(layout))
    with fake_rank(resolved) as context:
        return layout_facts(resolved, context, batch_of(0, config["model"], samples))
