"""Which server has which rows, without processes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from colossus.server.sharding import Sharding, TensorSpec

SPECS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 40), max_size=3),
        st.sampled_from([torch.int8, torch.float16, torch.float32, torch.float64]),
    ),
    min_size=1,
    max_size=12,
)


def specs_of(drawn: list[tuple[list[int], torch.dtype]]) -> list[TensorSpec]:
    return [TensorSpec(f"t{index}", tuple(shape), dtype) for index, (shape, dtype) in enumerate(drawn)]


@given(drawn=SPECS, num_servers=st.integers(1, 6))
def test_every_row_is_on_one_server(drawn: list[tuple[list[int], torch.dtype]], num_servers: int) -> None:
    sharding = Sharding(num_servers)
    specs = specs_of(drawn)
    sharding.place(specs)
    loads = [0] * num_servers
    for spec in specs:
        ranges = sharding.ranges[spec.name]
        assert [part.start for part in ranges] == [0, *(part.stop for part in ranges[:-1])]
        assert ranges[-1].stop == spec.num_rows
        assert len({part.server for part in ranges}) == len(ranges)
        assert all(part.start < part.stop for part in ranges) or spec.num_rows == 0
        for part in ranges:
            loads[part.server] += (part.stop - part.start) * spec.row_bytes
    assert loads == sharding.loads
    for spec in specs:
        sharding.remove(spec.name)
    assert sharding.loads == [0] * num_servers


@given(drawn=SPECS, num_servers=st.integers(1, 6), seed=st.randoms())
def test_balanced_and_the_same_for_all(
    drawn: list[tuple[list[int], torch.dtype]], num_servers: int, seed: object
) -> None:
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
    sharding.place(
        [
            TensorSpec("table", (1000, 16), torch.float32),
            TensorSpec("bias", (16,), torch.float32),
            TensorSpec("step", (), torch.float64),
        ]
    )
    assert [part.stop - part.start for part in sharding.ranges["table"]] == [334, 333, 333]
    assert [(part.server, part.stop) for part in sharding.ranges["bias"]] == [(1, 16)]
    assert [(part.server, part.stop) for part in sharding.ranges["step"]] == [(2, 1)]
    sharding.place([TensorSpec("more", (5, 8), torch.float32)])  # what was there before counts
    assert max(sharding.loads) - min(sharding.loads) <= 64
