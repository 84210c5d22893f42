"""``colossus show --memory``: how much memory the ranks of a plan need, and what makes one fit that does not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from colossus.arithmetic import aligned, byte_count, counted
from colossus.config import Config, ConfigError
from colossus.config.plans import describe_plan
from colossus.planner.memory import predict_memory
from colossus.planner.rank_memory import PlanMemory, RankMemory
from colossus.planner.remedies import remedies

#: what each kind is
_MEANINGS = {
    "weights": "parameters and buffers, as they are stored",
    "gathered": "whole parameters beside them, while a block runs (ZeRO)",
    "gradients": "until they are reduced",
    "buffers": "in which gradients are reduced, and parameters arrive",
    "optimizer": "its state",
    "activations": "kept for backward, and what the fullest forward or backward needs",
    "update": "reductions after the last backward, or the optimizer's step: more than activations need",
    "on the host": "parallel.zero.offload",
}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str) -> int:
    """``80GB`` (of 1000), ``79.6GiB`` (of 1024), ``500 MB``, or a number of bytes.

    Raises:
        ConfigError: for anything else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if found is None or (found[3] and not found[2]) or not float(found[1]):
        raise ConfigError(f"--limit: {text!r} is no size of memory; write 80GB, 79.6GiB or a number of bytes")
    unit = (_BINARY if found[3] else _UNITS)[found[2].upper()]
    return int(float(found[1]) * unit)


def render_memory(
    config: Config, load: Callable[[Sequence[str]], Config], limit: str | None = None, *, as_json: bool = False
) -> str:
    """The memory of a resolved config's plan, as text or as JSON.

    Args:
        load: the same config with overrides on top.
        limit: bytes of a device, as `parse_bytes` takes them: where the plan needs more, changes are tried.

    Raises:
        ConfigError: see `predict_memory`.
    """
    most = None if limit is None else parse_bytes(limit)
    plan = predict_memory(config)
    tried = _tried(config, load) if most is not None and plan.fullest.total > most else []
    if as_json:
        return json.dumps(_as_json(config, plan, most, tried), indent=1)
    fullest = plan.fullest
    where = f"pipeline rank {fullest.rank} of {len(plan.ranks)}" if len(plan.ranks) > 1 else "each rank"
    head = [
        str(config.name),
        f"plan        {describe_plan(config)}",
        f"memory      {byte_count(fullest.total)} on {where}, predicted",
    ]
    if most is not None:
        left = most - fullest.total
        fits = f"fits, {byte_count(left)} are left" if left >= 0 else f"does not fit, {byte_count(-left)} are missing"
        head.append(f"limit       {byte_count(most)}: {fits}")
    head += [f"note        {note}" for note in plan.notes]
    rows = [(name, byte_count(abs(size)), _MEANINGS[name]) for name, size in fullest.kinds.items() if size]
    sections = ["\n".join(head), aligned([*rows, ("total", byte_count(fullest.total), "")], left=(0, 2))]
    if len(plan.ranks) > 1:
        sections.append(_stage_table(plan.ranks))
    if tried:
        sections.append(_remedy_table(tried, most or 0))
    return "\n\n".join(sections)


def _stage_table(ranks: Sequence[RankMemory]) -> str:
    kinds = [kind for kind in _MEANINGS if any(rank.kinds.get(kind) for rank in ranks)]
    rows = [["pipeline rank", "stages", "in flight", *kinds, "total"]]
    for rank in ranks:
        sizes = [byte_count(abs(rank.kinds.get(kind, 0))) for kind in kinds]
        stages = ",".join(map(str, rank.stages))
        rows.append([str(rank.rank), stages, str(rank.in_flight), *sizes, byte_count(rank.total)])
    return aligned(rows)


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
    config: Config, plan: PlanMemory, most: int | None, tried: Sequence[tuple[tuple[str, ...], int]]
) -> dict[str, Any]:
    ranks = [
        {"rank": r.rank, "stages": r.stages, "in_flight": r.in_flight, "bytes": r.kinds, "total": r.total}
        for r in plan.ranks
    ]
    found: dict[str, Any] = {
        "plan": describe_plan(config), "fullest": plan.fullest.rank, "ranks": ranks, "notes": plan.notes
    }  # fmt: skip
    if most is not None:
        found |= {"limit": most, "fits": plan.fullest.total <= most}
        found["remedies"] = [{"overrides": changes, "total": total} for changes, total in tried]
    return found
