"""Which server has which rows, without processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossus.server.sharding import Sharding, TensorSpec

SPECS = st.lists(
    st.tuples(st.lists(st.integers(0, 40), max_size=3), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=12
)


def specs_of(drawn: list[tuple[list[int], int]]) -> list[TensorSpec]:
    return [TensorSpec(f"t{index}", tuple(shape), size) for index, (shape, size) in enumerate(drawn)]


@given(drawn=SPECS, num_servers=st.integers(1, 6))
def test_every_row_is_on_one_server(drawn: list[tuple[list[int], int]], num_servers: int) -> None:
    sharding = Sharding(num_servers)
    specs = specs_of(drawn)
    sharding.place(specs)
    loads = [0] * num_servers
    for spec in specs:
        ranges = sharding.ranges[spec.name]
        assert [part.start for part in ranges] == [0, *(part.stop for part in ranges[:-1])]
        assert ranges[-1].stop == spec.num_rows
        assert len({part.server for part in ranges}) == len(ranges)
        assert all(len(part) for part in ranges) or spec.num_rows == 0
        for part in ranges:
            loads[part.server] += len(part) * spec.row_bytes
    assert loads == sharding.loads
    for spec in specs:
        sharding.remove(spec.name)
    assert sharding.loads == [0] * num_servers


@given(drawn=SPECS, num_servers=st.integers(1, 6), seed=st.randoms())
def test_balanced_and_the_same_for_all(drawn: list[tuple[list[int], int]], num_servers: int, seed: object) -> None:
    """Loads differ by at most the largest piece that is not cut; the order of tensors does not matter."""
    first, second = Sharding(num_servers), Sharding(num_servers)
    specs = specs_of(drawn)
    first.place(specs)
    shuffled = list(specs)
    seed.shuffle(shuffled)  # type: ignore[attr-defined]
    second.place(shuffled)
    assert first.ranges == second.ranges
    share = sum(spec.nbytes for spec in specs) / num_servers
    piece = max([spec.row_bytes for spec in specs] + [spec.nbytes for spec in specs if spec.nbytes <= share / 8])
    assert max(first.loads) - min(first.loads) <= piece


def test_a_large_table_is_cut_and_small_tensors_are_whole() -> None:
    sharding = Sharding(3)
    sharding.place([TensorSpec("table", (1000, 16), 4), TensorSpec("bias", (16,), 4), TensorSpec("step", (), 8)])
    assert [len(part) for part in sharding.ranges["table"]] == [334, 333, 333]
    assert [(part.server, len(part)) for part in sharding.ranges["bias"]] == [(1, 16)]
    assert [(part.server, len(part)) for part in sharding.ranges["step"]] == [(2, 1)]
    sharding.place([TensorSpec("more", (5, 8), 4)])  # what was there before counts
    assert max(sharding.loads) - min(sharding.loads) <= 64


def test_what_cannot_be_placed() -> None:
    with pytest.raises(ValueError, match="0 servers"):
        Sharding(0)
    sharding = Sharding(2)
    sharding.place([TensorSpec("w", (3,), 4)])
    with pytest.raises(ValueError, match="two tensors 'w'"):
        sharding.place([TensorSpec("w", (3,), 4)])
