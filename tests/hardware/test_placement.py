"""Which ranks of a group share a host: against the list of all groups."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossus.context.grid import RankGrid
from colossus.hardware.data_sheets import FromDataSheet
from colossus.hardware.hardware import OPERATIONS
from colossus.hardware.host_placement import GroupSpread, Placement

AXES = ("pipeline", "data", "row", "col")
sizes = st.lists(st.integers(1, 4), min_size=4, max_size=4)


@given(sizes, st.sets(st.sampled_from(AXES)), st.data())
def test_the_group_on_most_hosts_of_all(counts: list[int], within: set[str], data: st.DataObject) -> None:
    grid = RankGrid(dict(zip(AXES, counts, strict=True)), {"tensor": ("row", "col")})
    world = grid.world_size
    hosts = data.draw(st.sampled_from([hosts for hosts in range(1, world + 1) if world % hosts == 0]))
    axes = tuple(axis for axis in AXES if axis in within)
    on_hosts = [Counter(at * hosts // world for at in grid.group(rank, axes)) for rank in range(world)]
    found = Placement(grid, hosts).of(axes)
    assert found.ranks == grid.size(axes)
    assert found.hosts == max(map(len, on_hosts))
    assert found.on_a_host in {max(of.values()) for of in on_hosts if len(of) == found.hosts}


def test_seconds_are_those_of_the_ranks_and_hosts() -> None:
    grid = RankGrid({"pipeline": 2, "data": 4, "tensor": 4})
    placement, h100 = Placement(grid, hosts=4), FromDataSheet("h100")
    spreads = {"pipeline": GroupSpread(2, 2, 1), "data": GroupSpread(4, 2, 2), "tensor": GroupSpread(4, 1, 4)}
    assert {axis: placement.of(axis) for axis in grid.names} == spreads
    for operation in OPERATIONS[:-1]:
        for axis, spread in spreads.items():
            seconds = h100.collective_seconds(operation, spread.ranks, 1e6, hosts=spread.hosts)
            assert placement.seconds(h100, operation, axis, 1e6) == seconds
    # a message along data goes to a neighbour; the last one of a host has it on the next
    assert placement.seconds(h100, "send", "data", 1e6) == h100.collective_seconds("send", 2, 1e6, hosts=2)
    assert placement.seconds(h100, "send", "tensor", 1e6) == h100.collective_seconds("send", 2, 1e6)
    with pytest.raises(ValueError, match="32 ranks cannot be spread evenly over 5 hosts"):
        Placement(grid, hosts=5)
