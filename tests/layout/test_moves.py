"""Moves between layouts: for every pair of layouts they are right, in value and in gradient, or refused."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from helpers.dense import collect, gradient_layout, run_on_all, spread
from helpers.ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from colossus.context.grid import RankGrid
from colossus.context.parallel_context import ParallelContext
from colossus.layout.layout import Layout
from colossus.layout.moves import moves
from colossus.layout.redistribute import move


def all_layouts(axes: tuple[str, ...], ndim: int) -> list[Layout]:
    """Every layout: each axis shards a dim, is partial, gradient-partial or not named; in every order."""
    layouts = {}
    for order in itertools.permutations(axes):
        for places in itertools.product([*range(ndim), "partial", "grad_partial", "whole"], repeat=len(axes)):
            where = dict(zip(order, places, strict=True))
            dims = tuple(tuple(axis for axis in order if where[axis] == dim) for dim in range(ndim))
            partial = tuple(axis for axis in axes if where[axis] == "partial")
            grad_partial = tuple(axis for axis in axes if where[axis] == "grad_partial")
            layouts[Layout(dims, partial, grad_partial)] = True
    return list(layouts)


def is_possible(source: Layout, target: Layout) -> bool:
    """A value cannot become a partial sum, and a partial gradient cannot become complete on every rank."""
    if set(target.partial) - set(source.partial):
        return False
    return not [axis for axis in source.grad_partial if axis not in (*target.grad_partial, *target.shard_axes)]


def simulate(source: Layout, target: Layout, grid: RankGrid, shape: tuple[int, ...], seed: int) -> None:
    """The moves on all ranks at once: any value in the source layout arrives, any gradient comes back."""
    sizes = grid.sizes
    generator = torch.Generator().manual_seed(seed)
    value, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    steps = moves(source, target)
    parts = spread(value, source, sizes, generator)
    for step in steps:
        parts = run_on_all(step.forward, parts, grid, step.axes, step.dim, step.to_dim)
    torch.testing.assert_close(collect(parts, target, sizes, shape), value, rtol=0, atol=1e-9)
    parts = spread(gradient, gradient_layout(target), sizes, generator)
    for step in reversed(steps):
        dims = (step.to_dim, step.dim) if step.backward == "all_to_all" else (step.dim, step.to_dim)
        parts = run_on_all(step.backward, parts, grid, step.axes, *dims)
    torch.testing.assert_close(collect(parts, gradient_layout(source), sizes, shape), gradient, rtol=0, atol=1e-9)


def check(source: Layout, target: Layout, grid: RankGrid, shape: tuple[int, ...], seed: int = 0) -> bool:
    if is_possible(source, target):
        simulate(source, target, grid, shape, seed)
        return True
    with pytest.raises(ValueError, match="cannot move from"):
        moves(source, target)
    return False


def test_every_pair_over_two_axes() -> None:
    """All 729 pairs on two dims, all 81 or so on one."""
    grid = RankGrid({"a": 2, "b": 3})
    for ndim, shape in ((2, (6, 6)), (1, (6,))):
        every = all_layouts(("a", "b"), ndim)
        done = [check(source, target, grid, shape) for source, target in itertools.product(every, repeat=2)]
        assert len(done) == len(every) ** 2
        assert 0.3 < sum(done) / len(done) < 0.9


THREE = {ndim: all_layouts(("a", "b", "c"), ndim) for ndim in (1, 2, 3)}
pairs = st.integers(1, 3).flatmap(lambda ndim: st.tuples(*[st.sampled_from(THREE[ndim])] * 2))


@given(pairs, st.sampled_from([(2, 2, 2), (2, 3, 1), (1, 2, 2), (3, 2, 2)]), st.integers(0, 2**31))
def test_pairs_over_three_axes(pair: tuple[Layout, Layout], counts: tuple[int, int, int], seed: int) -> None:
    grid = RankGrid(dict(zip("abc", counts, strict=True)))
    check(*pair, grid, (math.prod(counts),) * len(pair[0].dims), seed)


@given(pairs)
def test_what_is_there_already_costs_nothing(pair: tuple[Layout, Layout]) -> None:
    source, target = pair
    assert moves(source, source) == ()
    if is_possible(source, target):
        untouched = [a for a in "abc" if _place(source, a) == _place(target, a) and not _place(source, a)[0].isdigit()]
        assert not {axis for step in moves(source, target) for axis in step.axes} & set(untouched)


def _place(layout: Layout, axis: str) -> tuple[str, ...]:
    for dim, axes in enumerate(layout.dims):
        if axis in axes:
            return (str(dim),)
    return ("partial" if axis in layout.partial else "grad_partial" if axis in layout.grad_partial else "whole",)


def text(source: Layout, target: Layout) -> list[str]:
    return [str(step) for step in moves(source, target)]


def test_known_moves() -> None:
    """The rows of the table that 1D and 2D need, in the fewest collectives."""
    whole = Layout.whole(2)
    t = ("t",)
    features, tokens = Layout(((), t)), Layout((t, ()))
    assert text(whole, Layout(((), ()), grad_partial=t)) == ["identity/sum over t"]
    assert text(Layout(((), ()), partial=t), whole) == ["sum/identity over t"]
    assert text(Layout(((), ()), partial=t), tokens) == ["reduce_scatter/gather over t dim 0"]
    assert text(tokens, Layout(((), ()), grad_partial=t)) == ["gather/reduce_scatter over t dim 0"]
    assert text(tokens, whole) == ["gather/slice over t dim 0"]
    assert text(whole, tokens) == ["slice/gather over t dim 0"]
    assert text(Layout(((), ()), grad_partial=t), tokens) == ["slice/pad over t dim 0"]
    assert text(tokens, features) == ["all_to_all/all_to_all over t dim 0 to 1"]
    assert text(Layout((("row", "col"), ())), whole) == ["gather/slice over row,col dim 0"]
    assert text(Layout(((), ()), partial=("row", "col")), whole) == ["sum/identity over row,col"]


# -- on real ranks --------------------------------------------------------------------------------------------

GRID = RankGrid({"a": 2, "b": 2})
EVERY = [*all_layouts(("a", "b"), 2), *all_layouts(("a", "b"), 1)]
SAMPLE = random.Random(4).sample(
    [
        (source, target)
        for source, target in itertools.product(EVERY, repeat=2)
        if len(source.dims) == len(target.dims) and source != target and is_possible(source, target)
    ],
    100,
)


def _redistribute_all(context: ParallelContext) -> list[tuple[Tensor, Tensor]]:
    out = []
    for seed, (source, target) in enumerate(SAMPLE):
        parts, gradients, _, _ = _prepare(seed, source, target)
        local = parts[context.rank].clone().requires_grad_()
        moved = move(local, source, target, context)
        moved.backward(gradients[context.rank])
        assert local.grad is not None
        out.append((moved.detach(), local.grad))
    return out


def _prepare(seed: int, source: Layout, target: Layout) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (4,) * len(source.dims)
    value, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    parts = spread(value, source, GRID.sizes, generator)
    return parts, spread(gradient, gradient_layout(target), GRID.sizes, generator), value, gradient


def test_redistribute_on_real_ranks() -> None:
    results = run_ranks(4, _redistribute_all, plan=GRID)
    for seed, (source, target) in enumerate(SAMPLE):
        _, _, value, gradient = _prepare(seed, source, target)
        moved = collect([rank[seed][0] for rank in results], target, GRID.sizes, value.shape)
        back = collect([rank[seed][1] for rank in results], gradient_layout(source), GRID.sizes, value.shape)
        torch.testing.assert_close(moved, value, rtol=0, atol=1e-12, msg=f"{source} to {target}")
        torch.testing.assert_close(back, gradient, rtol=0, atol=1e-12, msg=f"gradient of {source} to {target}")


def _indivisible(context: ParallelContext) -> str:
    try:
        move(torch.zeros(3, 4), Layout.whole(2), Layout((("a",), ())), context)
    except ValueError as error:
        return str(error)
    return ""


def test_a_dim_that_does_not_divide() -> None:
    message = "dim 0 of a tensor of shape (3, 4) has 3 elements, which do not divide over the 2 ranks of axis a. "
    for words in run_ranks(4, _indivisible, plan=GRID):
        assert words.startswith(message + "Pad it or choose sizes so that it has 2 or 4; ")
        assert ": move(torch.zeros(3, 4)" in words.splitlines()[-1]


# -- words ----------------------------------------------------------------------------------------------------


def test_refusals_say_why() -> None:
    whole = Layout.whole(1)
    with pytest.raises(ValueError, match=r"cannot move from \[-\] Replicate\(a\) to \[-\]: .*gradient.*reduced"):
        moves(Layout(((),), grad_partial=("a",)), whole)
    with pytest.raises(ValueError, match=r"cannot move from \[-\] to \[-\] Partial\(a\): .*partial sum over a"):
        moves(whole, Layout(((),), partial=("a",)))
    with pytest.raises(
        ValueError, match=r"cannot move from \[Shard\(a\)\] to \[-\] Partial\(a\): .*partial sum over a"
    ):
        moves(Layout((("a",),)), Layout(((),), partial=("a",)))
    with pytest.raises(ValueError, match=r"cannot move from \[-\] to \[-, -\]: the number of dims differs"):
        moves(whole, Layout.whole(2))
