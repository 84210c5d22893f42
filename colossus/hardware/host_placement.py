"""The placement of ranks on hosts, and the hosts that a group spans. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from colossus.arithmetic import counted
from colossus.context.grid import Axes, RankGrid
from colossus.hardware.hardware import Hardware


@dataclass(frozen=True)
class GroupSpread:
    """The spread of a group over hosts.

    Attributes:
        ranks: size of the group.
        hosts: number of hosts that it spans.
        on_a_host: the most ranks of the group on one host.
    """

    ranks: int
    hosts: int
    on_a_host: int


class Placement:
    """The ranks of a grid on hosts, in order and as many on each: neighbours on the innermost axis share a host.

    Raises:
        ValueError: the ranks are no multiple of the hosts.
    """

    def __init__(self, grid: RankGrid, hosts: int = 1) -> None:
        if hosts < 1 or grid.world_size % hosts:
            raise ValueError(
                f"{counted(grid.world_size, 'rank')} cannot be spread evenly over {counted(hosts, 'host')}: choose "
                f"hosts that divide the ranks"
            )
        self.grid, self.hosts = grid, hosts
        self.ranks_per_host = grid.world_size // hosts
        self._spreads: dict[str | tuple[str, ...], GroupSpread] = {}

    def of(self, axes: Axes) -> GroupSpread:
        """Return the spread of the groups along these axes (as `RankGrid.axes` takes them).

        The groups are alike if the sizes of the axes divide the ranks of a host, or the other way round. Else the
        result is that of the group on most hosts.
        """
        key = axes if isinstance(axes, str) else tuple(axes)
        if key not in self._spreads:
            within = set(self.grid.axes(key))
            along = [(size, name in within) for name, size in self.grid.sizes.items() if size > 1]
            self._spreads[key] = _spread(tuple(along), self.ranks_per_host)
        return self._spreads[key]

    def seconds(self, hardware: Hardware, operation: str, axes: Axes, input_bytes: float) -> float:
        """Return the seconds of a collective along these axes, or of a message (``send``) to a neighbour on them.

        All groups along the axes run at the same time; see `Hardware.collective_seconds`.
        """
        spread = self.of(axes)
        if operation == "send":
            return hardware.collective_seconds("send", min(2, spread.ranks), input_bytes, hosts=min(2, spread.hosts))
        return hardware.collective_seconds(operation, spread.ranks, input_bytes, hosts=spread.hosts)


@cache
def _spread(along: tuple[tuple[int, bool], ...], ranks_per_host: int) -> GroupSpread:
    """Return the spread of the groups on a grid, that of the one on most hosts if they differ.

    Args:
        along: size of each axis, outermost first, and whether it is one of the group's.
        ranks_per_host: ranks of each host.
    """
    # A group's first rank counts by its place in its host, so that the loop is over one host's groups, not over all.
    members, starts, stride = [0], {0}, 1
    for size, is_within in reversed(along):
        if is_within:
            members = [rank + stride * at for at in range(size) for rank in members]
        else:
            starts = {(rank + stride * at) % ranks_per_host for at in range(size) for rank in starts}
        stride *= size
    spreads = []
    for start in starts:
        on_host: dict[int, int] = {}
        for rank in members:
            host = (start + rank) // ranks_per_host
            on_host[host] = on_host.get(host, 0) + 1
        spreads.append(GroupSpread(len(members), len(on_host), max(on_host.values())))
    return max(spreads, key=lambda spread: spread.hosts)
