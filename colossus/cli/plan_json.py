"""``colossus plan --json``: all numbers of the plans, in seconds and bytes. No torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from colossus.cli.memory_table import memory_as_json
from colossus.cli.plan_table import Question, exposed_share, plan_words
from colossus.planner.plan_estimate import PlanEstimate
from colossus.planner.search_result import SearchResult


def as_json(question: Question, result: SearchResult, explained: int | None = None) -> dict[str, Any]:
    """Return the question and every plan as an object for JSON.

    Args:
        question: the question.
        result: the plans.
        explained: index of the plan that comes with its timeline.
    """
    hardware = question.hardware
    plans = [_plan(plan) for plan in result.plans]
    if explained is not None:
        plans[explained]["timeline"] = [
            [{**asdict(span.action), "start": span.start, "end": span.end} for span in own]
            for own in result.plans[explained].spans
        ]
    return {
        "file": question.file,
        "overrides": question.overrides,
        "keep": question.keep,
        "devices": question.devices,
        "hosts": question.hosts,
        "memory": question.memory,
        "hardware": {
            "name": hardware.name,
            "is_measured": hardware.is_measured,
            "network": None if hardware.network is None else asdict(hardware.network),
        },
        "tried": result.tried,
        "search_seconds": result.seconds,
        "plans": plans,
        "usual": {name: _plan(plan) for name, plan in result.usual.items()},
    }


def _plan(plan: PlanEstimate) -> dict[str, Any]:
    return {
        "plan": plan_words(plan.config),
        "overrides": plan.overrides,
        "step_seconds": plan.seconds,
        "tokens_per_step": plan.tokens,
        "tokens_per_second": plan.tokens_per_second,
        "flops": plan.flops,
        "mfu": plan.mfu,
        "bubble": plan.bubble,
        "exposed": exposed_share(plan),
        "parts": dict(plan.parts),
        "axes": {axis: asdict(cost) for axis, cost in plan.axes.items()},
        "memory": memory_as_json(plan.memory),
    }
