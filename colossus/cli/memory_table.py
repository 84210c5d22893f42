"""The memory of a plan's ranks by kind, as tables and as JSON: what ``show --memory`` and ``plan`` share. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colossus.arithmetic import aligned, byte_count
from colossus.planner.rank_memory import PlanMemory, RankMemory

#: kind -> what it is
MEANINGS = {
    "weights": "parameters and buffers, as they are stored",
    "gathered": "whole parameters beside them, while a block runs (ZeRO)",
    "gradients": "until they are reduced",
    "buffers": "in which gradients are reduced, and parameters arrive",
    "optimizer": "its state",
    "activations": "kept for backward, and what the fullest forward or backward needs",
    "update": "reductions after the last backward, or the optimizer's step: more than activations need",
    "on the host": "parallel.zero.offload",
}


def kind_table(rank: RankMemory) -> str:
    """One line for each kind that a rank holds, and the total."""
    rows = [(kind, byte_count(abs(size)), MEANINGS[kind]) for kind, size in rank.kinds.items() if size]
    return aligned([*rows, ("total", byte_count(rank.total), "")], left=(0, 2))


def stage_table(ranks: Sequence[RankMemory]) -> str:
    """One line for each pipeline rank."""
    kinds = [kind for kind in MEANINGS if any(rank.kinds.get(kind) for rank in ranks)]
    rows = [["pipeline rank", "stages", "in flight", *kinds, "total"]]
    for rank in ranks:
        sizes = [byte_count(abs(rank.kinds.get(kind, 0))) for kind in kinds]
        stages = ",".join(map(str, rank.stages))
        rows.append([str(rank.rank), stages, str(rank.in_flight), *sizes, byte_count(rank.total)])
    return aligned(rows)


def memory_as_json(plan: PlanMemory) -> dict[str, Any]:
    """In bytes."""
    ranks = [
        {"rank": r.rank, "stages": r.stages, "in_flight": r.in_flight, "bytes": r.kinds, "total": r.total}
        for r in plan.ranks
    ]
    return {"fullest": plan.fullest.rank, "ranks": ranks, "notes": plan.notes}
