"""Products in panels of rows against the same product in one piece: every gather before with every sum behind it."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from helpers.ranks import run_ranks
from torch import Tensor

from colossus.comm.pending import Ready
from colossus.context.parallel_context import ParallelContext
from colossus.tensor_parallel.move_plan import BoundCollective, run
from colossus.tensor_parallel.panels import Panels

RANKS, MOST = 2, 3
#: of x; a dim of 1 leaves only the other to be split
SHAPES = ((1, 12, 8), (12, 1, 8), (12, 8), (2, 1, 12, 8), (3, 4, 8))


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def body(context: ParallelContext) -> list[str]:
    """Return what is wrong, and the counts of panels by case."""
    group, wrong, cases = context.group("tensor"), [], set()

    def moves(operation: str, dim: int) -> tuple[BoundCollective, ...]:
        return (BoundCollective(operation, group, dim),) if operation else ()

    for number, shape in enumerate(SHAPES):
        last = len(shape) - 1
        gathers = [("", 0), *(("gather", dim) for dim in range(last + 1))]
        sums = [("", 0), ("sum", -1), *(("reduce_scatter", dim) for dim in range(last + 1))]
        for gather, scatter in itertools.product(gathers, sums):
            x = numbers(*shape, seed=10 * number + group.index)
            w = numbers(6, shape[-1] * (RANKS if gather == ("gather", last) else 1), seed=7)
            bias = numbers(6, seed=8) if number % 2 else None
            before, after = moves(*gather), moves(*scatter)
            gathered = run(before, x).wait()
            scattered = scatter[1] if scatter[0] == "reduce_scatter" else last
            if (gathered.shape[scattered] if scattered < last else 6) % RANKS:
                continue
            panels = Panels.of(MOST, x, before, after)
            if panels is None:
                continue
            cases.add((gather[0], scatter[0], panels.x_blocks, panels.y_blocks, panels.moved_blocks))
            moved: list[Tensor] = []
            y = panels.multiply(x, Ready(w), bias, moved).wait()
            want = run(after, F.linear(gathered, w, bias), owned=True).wait()
            case = f"{shape}, {gather}, {scatter}, {panels.count} panels in dim {panels.dim}"
            if y.shape != want.shape or (y - want).abs().max() > 1e-12:
                wrong.append(case)
            if before and not torch.equal(panels.join(moved, panels.moved_blocks), gathered):
                wrong.append(f"{case}: x after its moves")
    for blocks in ((2, 1, 2), (1, 2, 2), (1, 1, 2), (1, 1, 1)):  # scattered, gathered, both, neither
        if not any(case[2:] == blocks for case in cases):
            wrong.append(f"no case with the blocks {blocks}")
    return wrong


def test_a_product_in_panels_is_that_in_one_piece() -> None:
    assert run_ranks(RANKS, body) == [[]] * RANKS
