"""Through whose hands rows go to their owners."""

from __future__ import annotations

from dataclasses import dataclass

from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.gradients.hosts import Hosts


@dataclass(frozen=True)
class Level:
    """One exchange on the way.

    Attributes:
        group: the ranks that exchange.
        towards: of each owner, by its index among all ranks that share a table, the index in ``group`` of the rank to
            which what is for it goes here.
    """

    group: AxisGroup
    towards: tuple[int, ...]


def levels_over(context: ParallelContext, axes: tuple[str, ...], hosts: Hosts | None) -> list[Level]:
    """From a rank to the owners of rows among those over ``axes``.

    Directly; or, given hosts, first to the rank of this host that has the owner's position on its host, which adds up
    what it gets (Parallax, 1808.02621: local aggregation), and from there between counterparts.

    The groups have connections of their own, so that what goes through them does not wait for buckets of gradients.
    """
    everyone = context.group(axes)
    if hosts is None or everyone.size == 1 or not set(axes) & {*context.grid.axes("data")}:
        return [Level(context.subgroup(axes, range(everyone.size), str(everyone)), tuple(range(everyone.size)))]
    members: dict[int, list[int]] = {}
    host_of, position_of = [], []
    for rank in everyone.ranks:
        host = hosts.of(context.grid.index(rank, "data"))
        host_of.append(host)
        position_of.append(len(members.setdefault(host, [])))
        members[host].append(rank)
    return [Level(hosts.inside(axes), tuple(position_of)), Level(hosts.between(), tuple(host_of))]
