"""The memory of a plan's ranks by kind, as tables and as JSON, for ``show --memory`` and ``plan``. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colossus.arithmetic import aligned, byte_count
from colossus.planner.plan_estimate import PlanMemory, RankMemory

#: explanation of each kind of memory
MEANINGS = {
    "weights": "parameters and buffers as they are stored",
    "gathered": "whole parameters beside the stored shards, while a block runs (ZeRO)",
    "gradients": "until they are reduced",
    "buffers": "buckets of gradients, and buffers of gathers and reductions (ZeRO)",
    "optimizer": "its state",
    "activations": "saved for backward, and temporaries of the largest forward or backward",
    "update": "needed by the optimizer's step",
    "on the host": "offloaded by parallel.zero.offload",
}


def kind_table(rank: RankMemory) -> str:
    """Return a table with a line for each kind of a rank's memory, and the total."""
    rows = [(kind, byte_count(abs(size)), MEANINGS[kind]) for kind, size in rank.kinds.items() if size]
    return aligned([*rows, ("total", byte_count(rank.total), "")], left_columns=(0, 2))


def stage_table(ranks: Sequence[RankMemory]) -> str:
    """Return a table with a line for each pipeline rank."""
    kinds = [kind for kind in MEANINGS if any(rank.kinds.get(kind) for rank in ranks)]
    rows = [["pipeline rank", "stages", "in flight", *kinds, "total"]]
    for rank in ranks:
        sizes = [byte_count(abs(rank.kinds.get(kind, 0))) for kind in kinds]
        stages = ",".join(map(str, rank.stages))
        rows.append([str(rank.rank), stages, str(rank.in_flight), *sizes, byte_count(rank.total)])
    return aligned(rows)


def memory_as_json(plan: PlanMemory) -> dict[str, Any]:
    """Return the memory of a plan, in bytes, as an object for JSON."""
    ranks = [
        {"rank": r.rank, "stages": r.stages, "in_flight": r.in_flight, "bytes": r.kinds, "total": r.total}
        for r in plan.ranks
    ]
    return {"fullest": plan.fullest.rank, "ranks": ranks, "notes": plan.notes}
