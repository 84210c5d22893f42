"""Rank <-> coordinates on named axes: laws for any grid, and the axes of every tensor mode."""

# configs are written with dict(...), and so are the tests of them

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossus.config.schema import AXES, Parallel
from colossus.context.grid import RankGrid, build_grid

NAMES = ("a", "b", "c", "d", "e")
grids = st.lists(st.integers(1, 3), min_size=1, max_size=5).map(
    lambda sizes: RankGrid(dict(zip(NAMES, sizes, strict=False)), {"all": NAMES[: len(sizes)]})
)


@st.composite
def grid_and_axes(draw: st.DrawFn) -> tuple[RankGrid, tuple[str, ...]]:
    grid = draw(grids)
    return grid, tuple(draw(st.lists(st.sampled_from(grid.names), unique=True)))


@given(grids)
def test_rank_and_coordinates_are_inverse(grid: RankGrid) -> None:
    points = list(itertools.product(*[range(size) for size in grid.sizes.values()]))  # row-major
    assert [tuple(grid.coordinates(rank).values()) for rank in range(grid.world_size)] == points
    assert all(grid.rank(grid.coordinates(rank)) == rank for rank in range(grid.world_size))


@given(grid_and_axes())
def test_groups_partition_the_ranks(case: tuple[RankGrid, tuple[str, ...]]) -> None:
    grid, axes = case
    groups = {tuple(grid.group(rank, axes)) for rank in range(grid.world_size)}
    assert sorted(itertools.chain(*groups)) == list(range(grid.world_size))
    assert {len(group) for group in groups} == {grid.size(axes)}


@given(grid_and_axes())
def test_index_is_the_place_in_the_group(case: tuple[RankGrid, tuple[str, ...]]) -> None:
    grid, axes = case
    for rank in range(grid.world_size):
        group = grid.group(rank, axes)
        assert group[grid.index(rank, axes)] == rank
        assert grid.group(group[-1], axes) == group
        others = [axis for axis in grid.names if axis not in axes]
        assert len({tuple(grid.coordinates(other)[axis] for axis in others) for other in group}) == 1


def test_order_of_axes_is_the_order_of_the_group() -> None:
    grid = RankGrid({"row": 2, "col": 3})
    assert grid.group(0, ("row", "col")) == [0, 1, 2, 3, 4, 5]
    assert grid.group(0, ("col", "row")) == [0, 3, 1, 4, 2, 5]
    assert grid.index(3, ("row", "col")) == 3
    assert grid.index(3, ("col", "row")) == 1


def test_errors_name_the_axes() -> None:
    grid = RankGrid({"row": 2, "col": 3}, {"tensor": ("row", "col")})
    with pytest.raises(ValueError, match="no axis named 'depth' in this plan; axes are col, row, tensor"):
        grid.group(0, "depth")
    with pytest.raises(ValueError, match="name the same mesh axis twice"):
        grid.size(("tensor", "row"))
    with pytest.raises(ValueError, match=r"rank 6 is outside 0\.\.5"):
        grid.coordinates(6)


MODES = [
    (dict(mode="1d", size=6), {"tensor": 6}),
    (dict(mode="2d", size=9), {"row": 3, "col": 3}),
    (dict(mode="2d", shape=(2, 3)), {"row": 2, "col": 3}),
    (dict(mode="2.5d", size=8, depth=2), {"depth": 2, "row": 2, "col": 2}),
    (dict(mode="3d", size=27), {"i": 3, "j": 3, "k": 3}),
    (dict(mode="3d", shape=(1, 2, 3)), {"i": 1, "j": 2, "k": 3}),
]


@pytest.mark.parametrize(("tensor", "axes"), MODES)
@pytest.mark.parametrize("order", [AXES, ("tensor", "sequence", "data", "pipeline")])
def test_build_grid(tensor: dict, axes: dict[str, int], order: tuple[str, ...]) -> None:
    parallel = Parallel.model_validate(dict(data=2, pipeline=3, sequence=2, tensor=tensor, rank_order=order))
    grid = build_grid(parallel)
    assert grid.world_size == 2 * 3 * 2 * math.prod(axes.values())
    assert grid.public["tensor"] == tuple(axes)
    assert {axis: grid.sizes[axis] for axis in axes} == axes
    where = [grid.names.index(grid.public[name][0]) for name in order]
    assert where == sorted(where)
    if order == AXES:  # tensor ranks are neighbours
        assert grid.group(0, "tensor") == list(range(grid.size("tensor")))
