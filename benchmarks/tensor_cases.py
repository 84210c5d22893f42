"""The cases of the tensor-mode benchmark by name, and what the formula says that their block moves.

A name is the mode, its ranks (along each axis where there are several) and ``keep`` for the policy that trades memory
for traffic: x is kept as gathered and weights are gathered once per microbatch. Without it both are gathered again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.workload import Workload
from colossus.comm.accounting import Traffic, move_traffic
from colossus.context.grid import LayerOptions, RankGrid
from colossus.context.parallel_context import ParallelContext
from colossus.layout.activation import Activation
from colossus.registry import TENSOR_MODES
from colossus.tensor_parallel.choose_sharding import Shardings
from colossus.tensor_parallel.mode import MatmulSharding
from colossus.tensor_parallel.traffic import matmul_traffic

PLAIN, DTENSOR = "plain", "dtensor"


@dataclass(frozen=True)
class Case:
    """One block on some ranks: plain torch, torch's DTensor, or colossus in a tensor mode.

    Attributes:
        mode: ``plain``, ``dtensor`` or a tensor mode.
        shape: ranks along each axis of the mode.
        keep, weights: policies of colossus, see `colossus.tensor_parallel.gathered_weights`.
    """

    mode: str
    shape: tuple[int, ...] = (1,)
    sequence_sharded: bool = False
    keep: bool = False
    weights: str = "matmul"

    @property
    def name(self) -> str:
        ranks = "" if self.mode == PLAIN else "x".join(map(str, self.shape))
        parts = (self.mode, "sequence" if self.sequence_sharded else "", ranks, "keep" if self.keep else "")
        return "-".join(filter(None, parts))

    @property
    def world(self) -> int:
        return math.prod(self.shape)

    @property
    def is_ours(self) -> bool:
        return self.mode not in (PLAIN, DTENSOR)

    @property
    def grid(self) -> RankGrid:
        axes = TENSOR_MODES.get(self.mode).axes
        others = ("pipeline", "data", "sequence")
        sizes = {**dict.fromkeys(others, 1), **dict(zip(axes, self.shape, strict=True))}
        return RankGrid(sizes, {**{name: (name,) for name in others}, "tensor": tuple(axes)})

    def context(self, rank: int = 0, *, connect: bool = True, device: str = "cpu") -> ParallelContext:
        options = LayerOptions(
            tensor_mode=self.mode, sequence_sharded=self.sequence_sharded, keep_gathered=self.keep,
            weight_scope=self.weights,
        )  # fmt: skip
        return ParallelContext(self.grid, rank, options=options, connect=connect, device=device)

    def shardings(self) -> Shardings:
        mode = TENSOR_MODES.get(self.mode)
        sizes = self.grid.sizes
        return Shardings.of(mode, Activation(), sizes, sequence_sharded=self.sequence_sharded, keep=self.keep)


def _cases() -> dict[str, Case]:
    cases = [Case(PLAIN)]
    for n in (2, 4, 8):
        cases += [Case("1d", (n,)), Case("1d", (n,), sequence_sharded=True), Case(DTENSOR, (n,))]
    for mode, shape in (("2d", (2, 2)), ("2d", (2, 3)), ("2.5d", (2, 2, 2)), ("3d", (2, 2, 2))):
        again = Case(mode, shape)
        cases += [again, replace(again, keep=True, weights="microbatch")]
    cases.sort(key=lambda case: case.world)
    return {case.name: case for case in cases}


CASES = _cases()


def unfit_reason(case: Case, workload: Workload) -> str | None:
    """Return why a block of this size does not divide over the ranks of a case; None when it does."""
    w = workload
    if case.mode == DTENSOR and w.heads % case.world:
        return f"heads = {w.heads} does not divide over {case.world} ranks"
    if not case.is_ours:
        return None
    from colossus.construct.build_model import build
    from colossus.layers import TransformerBlock

    try:
        build(lambda: TransformerBlock(w.hidden, w.heads), case.context(connect=False), materialize=False)
    except ValueError as error:
        return str(error)
    regions = case.shardings().regions
    for what, size, ways in (
        ("batch", w.batch, math.lcm(*(_ways(case, region.batch) for region in (regions.residual, regions.inner)))),
        ("tokens", w.tokens, _ways(case, regions.residual.tokens)),
    ):
        if size % ways:
            return f"{what} = {size} is not a multiple of {ways}"
    return None


def _ways(case: Case, axes: Sequence[str]) -> int:
    return math.prod(case.grid.sizes[axis] for axis in axes)


# -- the formula ----------------------------------------------------------------------------------------------


def block_traffic(case: Case, workload: Workload, microbatches: int = 1) -> Traffic:
    """Return what one rank sends for the block, forward and backward of all microbatches of a step."""
    h = workload.hidden
    shardings = case.shardings()
    total = Traffic()
    for split, inner, outputs in (
        ("column", h, {"query": h, "key": h, "value": h}),
        ("row", h, {"": h}),
        ("column", h, {"": 4 * h}),
        ("row", 4 * h, {"": h}),
    ):
        sharding = shardings.choose(split, inner, outputs)
        assert isinstance(sharding, MatmulSharding), sharding
        shape = (workload.batch, workload.tokens, inner)
        moved = matmul_traffic(
            sharding, *shardings.default_layouts(split), shape, sum(outputs.values()), shardings.sizes
        )
        total += moved.step(microbatches, keep=case.keep, weights=case.weights)
    return total + _norms(case, workload) * microbatches


def _norms(case: Case, workload: Workload) -> Traffic:
    """Return what two LayerNorms send: means and squares are gathered, in backward two sums are reduced."""
    outer = case.shardings().regions.residual
    n, rows = _ways(case, outer.features), workload.batch * workload.tokens // _ways(case, outer.batch + outer.tokens)
    return (move_traffic("gather", n, 2 * rows) + move_traffic("sum", n, 2 * rows)) * 2


def gathers_weights(case: Case, workload: Workload) -> bool:
    """Return whether the scope of weights makes a difference."""
    if not case.is_ours:
        return False
    often, once = (block_traffic(replace(case, weights=scope), workload) for scope in ("matmul", "step"))
    return often != once
