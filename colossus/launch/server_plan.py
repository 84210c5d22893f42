"""How many parameter servers a run has, and where they are. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colossus.config import Config
from colossus.config.plans import strategy_options


def num_servers(config: Config, nnodes: int) -> int:
    """As many as the strategy's ``servers`` says, where it has that; None there: one on each node."""
    options: Any = strategy_options(config)
    if not hasattr(options, "servers"):
        return 0
    wanted: int | None = options.servers
    return nnodes if wanted is None else wanted


def servers_of_nodes(number: int, nnodes: int) -> list[list[int]]:
    """Of each node the indices of its servers: spread evenly, neighbours on the same node."""
    nodes: list[list[int]] = [[] for _ in range(nnodes)]
    for index in range(number):
        nodes[index * nnodes // number].append(index)
    return nodes


def describe_servers(number: int, nnodes: int) -> str:
    """``2 processes beside the workers, one on each of 2 nodes``."""
    processes = f"{number} process{'' if number == 1 else 'es'} beside the workers"
    if nnodes == 1:
        return processes
    each = [len(indices) for indices in servers_of_nodes(number, nnodes)]
    return f"{processes}, {_spread(each)}"


def _spread(each: Sequence[int]) -> str:
    least, most = min(each), max(each)
    if least == most:
        return f"{'one' if most == 1 else most} on each of {len(each)} nodes"
    return f"{', '.join(map(str, each))} on the {len(each)} nodes"
