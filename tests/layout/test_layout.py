"""Layouts: boxes cover, shards come back, and the algebra of gradients."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from helpers.dense import points, spread
from helpers.ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st

from colossus.context.grid import RankGrid
from colossus.context.parallel_context import ParallelContext
from colossus.layout.activation import Activation, gradient_axes
from colossus.layout.layout import Layout
from colossus.layout.redistribute import gather, shard

NAMES = ("a", "b", "c")


@st.composite
def layouts(
    draw: st.DrawFn, ndim: int, states: tuple[str, ...] = ("partial", "grad_partial", "stored", "whole")
) -> Layout:
    """Every axis shards a dim, is partial, or is not named; in any order."""
    dims: list[list[str]] = [[] for _ in range(ndim)]
    other: dict[str, list[str]] = {"partial": [], "grad_partial": [], "stored": [], "whole": []}
    for axis in draw(st.permutations(NAMES)):
        place = draw(st.sampled_from([*range(ndim), *states]))
        (dims[place] if isinstance(place, int) else other[place]).append(axis)
    return Layout(
        tuple(map(tuple, dims)), tuple(other["partial"]), tuple(other["grad_partial"]), tuple(other["stored"])
    )


sizes = st.tuples(*[st.integers(1, 4)] * 3).map(lambda each: dict(zip(NAMES, each, strict=True)))
cases = st.integers(1, 3).flatmap(lambda ndim: st.tuples(layouts(ndim), st.tuples(*[st.integers(0, 9)] * ndim), sizes))


@given(cases)
def test_boxes_are_disjoint_and_cover(case: tuple[Layout, tuple[int, ...], dict[str, int]]) -> None:
    layout, shape, grid = case
    times = torch.zeros(shape)
    chunk = layout.chunk(shape, grid)
    for at in points(grid):
        box = layout.box(shape, grid, at)
        assert all(0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True))
        assert all(stop - start <= length for (start, stop), length in zip(box, chunk, strict=True))
        twin = {axis: at[axis] if axis in layout.shard_axes else 0 for axis in grid}
        assert layout.box(shape, grid, twin) == box  # axes that do not shard do not matter
        if twin == at:
            times[tuple(slice(*span) for span in box)] += 1
    assert torch.equal(times, torch.ones(shape))


@given(cases)
def test_each_element_is_owned_once(case: tuple[Layout, tuple[int, ...], dict[str, int]]) -> None:
    """Over any axes that include those that shard: a norm over them counts every element once."""
    layout, shape, grid = case
    times = torch.zeros(shape)
    axes = [axis for axis in NAMES if axis in layout.shard_axes or axis == "a"]
    for at in points(grid):
        # one rank of the axes left out: they agree on everything
        if all(at[axis] == 0 for axis in NAMES if axis not in axes) and layout.owns(at, axes):
            times[tuple(slice(*span) for span in layout.box(shape, grid, at))] += 1
    assert torch.equal(times, torch.ones(shape))


def test_the_first_axis_is_the_outermost() -> None:
    grid = {"row": 2, "col": 3}
    assert Layout((("row", "col"),)).box((12,), grid, {"row": 1, "col": 0}) == ((6, 8),)
    assert Layout((("col", "row"),)).box((12,), grid, {"row": 1, "col": 0}) == ((2, 4),)


# -- shard and gather -----------------------------------------------------------------------------------------


def at_rank(grid: RankGrid, rank: int) -> Any:
    return SimpleNamespace(grid=grid, coordinates=grid.coordinates(rank))


@given(cases)
def test_shards_hold_the_whole(case: tuple[Layout, tuple[int, ...], dict[str, int]]) -> None:
    layout, shape, grid = case
    whole = torch.arange(1.0, math.prod(shape) + 1).reshape(shape)
    back = torch.full(shape, -1.0)
    ranks = RankGrid(grid)
    for rank in range(ranks.world_size):
        part = shard(whole, layout, at_rank(ranks, rank))
        assert tuple(part.shape) == layout.chunk(shape, grid)
        box = layout.box(shape, grid, ranks.coordinates(rank))
        inside = tuple(slice(0, stop - start) for start, stop in box)
        back[tuple(slice(*span) for span in box)] = part[inside]
        part[inside] = 0
        assert not part.any(), "padding is not zero"
    assert torch.equal(back, whole)


ROUND_TRIPS = [
    (Layout((("a",), ())), (5, 3)),
    (Layout(((), ("b",))), (5, 3)),
    (Layout((("a", "b"), ())), (7, 2)),
    (Layout((("b", "a"),)), (2,)),
    (Layout((("b",), (), ("a",))), (1, 4, 9)),
    (Layout(((), ("b", "a"))), (2, 13)),
    (Layout.whole(2), (3, 3)),
    (Layout((("a",), ()), partial=("b",)), (5, 2)),
    (Layout((("a",),)), (0,)),
]


def _round_trips(context: ParallelContext) -> None:
    for seed, (layout, shape) in enumerate(ROUND_TRIPS):
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randn(shape, generator=generator, dtype=torch.float64)
        held = shard(whole, layout, context)
        if layout.partial:
            held = spread(whole, Layout(((),) * len(shape), layout.partial), context.grid.sizes, generator)[
                context.rank
            ]
            held = shard(held, layout, context)
        back = gather(held.requires_grad_(), layout, shape, context)
        torch.testing.assert_close(back, whole, rtol=0, atol=0 if not layout.partial else 1e-12, msg=str(layout))
        assert back.is_contiguous()
        assert not back.requires_grad


def test_shard_and_gather_on_real_ranks() -> None:
    run_ranks(4, _round_trips, plan=RankGrid({"a": 2, "b": 2}))


# -- gradients ------------------------------------------------------------------------------------------------


@st.composite
def uses(draw: st.DrawFn) -> tuple[Layout, Layout, dict[str, int]]:
    """A vector that scales the features of [batch, features], both split somehow over three axes."""
    state = {axis: draw(st.sampled_from(["batch", "features", "grad_partial", "whole"])) for axis in NAMES}
    chosen = {
        kind: tuple(axis for axis in NAMES if state[axis] == kind) for kind in ("batch", "features", "grad_partial")
    }
    activation = Layout((chosen["batch"], chosen["features"]), grad_partial=chosen["grad_partial"])
    return Layout((chosen["features"],)), activation, draw(sizes)


@given(uses(), st.integers(0, 2**31))
def test_gradient_axes_complete_the_gradient(case: tuple[Layout, Layout, dict[str, int]], seed: int) -> None:
    """The sum over exactly these axes of what the ranks compute is the gradient of one process, on every rank."""
    parameter, activation, grid = case
    generator = torch.Generator().manual_seed(seed)
    shape = tuple(each * 2 for each in activation.num_shards(grid))
    x, dy = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    true = (x * dy).sum(0)
    ranks = RankGrid(grid)
    xs = spread(x, Layout(activation.dims), grid, generator)
    dys = spread(dy, Layout(activation.dims, partial=activation.grad_partial), grid, generator)
    local = [(a * b).sum(0) for a, b in zip(xs, dys, strict=True)]
    axes = gradient_axes(parameter, activation)
    for rank in range(ranks.world_size):
        total = sum(local[member] for member in ranks.group(rank, axes))
        box = parameter.box(tuple(true.shape), grid, ranks.coordinates(rank))
        torch.testing.assert_close(total, true[slice(*box[0])], rtol=0, atol=1e-9)


# -- activations ----------------------------------------------------------------------------------------------


def test_roles_of_dims() -> None:
    activation = Activation(("data",), ("sequence",), ("tensor",))
    assert activation.at(4) == Layout((("data",), (), ("sequence",), ("tensor",)))
    assert activation.at(3) == Layout((("data",), ("sequence",), ("tensor",)))
    assert activation.at(2) == Layout((("data", "sequence"), ("tensor",)))
    assert activation.at(1) == Layout((("tensor",),))
    assert activation.shard_axes == ("data", "sequence", "tensor")
