"""Which ranks of a group share a host. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from colossus.arithmetic import counted
from colossus.context.grid import Axes, RankGrid
from colossus.hardware.hardware import Hardware


@dataclass(frozen=True)
class GroupSpread:
    """A group of ranks.

    Attributes:
        ranks: of the group.
        hosts: that it spans.
        on_a_host: ranks of the group on one host, at most.
    """

    ranks: int
    hosts: int
    on_a_host: int


class Placement:
    """Ranks of a grid on hosts: as many on each, in order, so that neighbours along the innermost axis share a host.

    Raises:
        ValueError: where the hosts do not divide the ranks.
    """

    def __init__(self, grid: RankGrid, hosts: int = 1) -> None:
        if hosts < 1 or grid.world_size % hosts:
            raise ValueError(
                f"{counted(grid.world_size, 'rank')} cannot be spread evenly over {counted(hosts, 'host')}: every host "
                f"has as many ranks"
            )
        self.grid, self.hosts = grid, hosts
        self.ranks_per_host = grid.world_size // hosts
        self._known: dict[str | tuple[str, ...], GroupSpread] = {}

    def of(self, axes: Axes) -> GroupSpread:
        """The groups along these axes (as `RankGrid.axes` takes them): of all of them the one on most hosts.

        They are alike where the sizes of the axes divide the ranks of a host, or the other way round.
        """
        key = axes if isinstance(axes, str) else tuple(axes)
        if key not in self._known:
            within = set(self.grid.axes(key))
            along = [(size, name in within) for name, size in self.grid.sizes.items() if size > 1]
            self._known[key] = _spread(tuple(along), self.ranks_per_host)
        return self._known[key]

    def seconds(self, hardware: Hardware, operation: str, axes: Axes, held: float) -> float:
        """Of a collective along these axes, see `Hardware.collective_seconds`; a message is one to a neighbour.

        All groups along the axes do the same at the same time.
        """
        spread = self.of(axes)
        if operation == "send":
            return hardware.collective_seconds("send", min(2, spread.ranks), held, hosts=min(2, spread.hosts))
        return hardware.collective_seconds(operation, spread.ranks, held, hosts=spread.hosts)


@cache
def _spread(along: tuple[tuple[int, bool], ...], ranks_per_host: int) -> GroupSpread:
    """Of the groups on a grid.

    Args:
        along: size of each axis, outermost first, and whether it is one of the group's.
    """
    members, starts, stride = [0], {0}, 1  # a start counts by its place in a host: other hosts see the same
    for size, is_within in reversed(along):
        if is_within:
            members = [rank + stride * at for at in range(size) for rank in members]
        else:
            starts = {(rank + stride * at) % ranks_per_host for at in range(size) for rank in starts}
        stride *= size
    of_each = []
    for start in starts:
        on_host: dict[int, int] = {}
        for rank in members:
            host = (start + rank) // ranks_per_host
            on_host[host] = on_host.get(host, 0) + 1
        of_each.append(GroupSpread(len(members), len(on_host), max(on_host.values())))
    return max(of_each, key=lambda spread: spread.hosts)
