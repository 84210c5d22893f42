"""The moves of one operand of a matmul, bound to the groups of a context."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colossus.comm.collectives import Pending, Ready
from colossus.comm.conjugate import start
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.layout.moves import Move


@dataclass(frozen=True)
class Step:
    """One move. ``rows``: of a fused weight, how many rows of dim 0 each output has in a rank's part."""

    operation: str
    group: AxisGroup
    dim: int
    to_dim: int = -1
    rows: tuple[int, ...] = ()

    def start(self, x: Tensor, *, owned: bool) -> Pending:
        if len(self.rows) < 2 or self.dim != 0:
            return start(self.operation, x, self.group, self.dim, self.to_dim, owned=owned)
        outputs, ranks = len(self.rows), self.group.size
        if len(set(self.rows)) == 1:  # as one dim more: no copy beside the collective's own
            return start(self.operation, x.unflatten(0, (outputs, -1)), self.group, 1).then(lambda y: y.flatten(0, 1))
        if self.operation == "gather":
            return start("gather", x, self.group, 0).then(lambda y: by_output(y, self.rows, ranks))
        return start(self.operation, by_rank(x, self.rows, ranks), self.group, 0)


def by_output(x: Tensor, rows: Sequence[int], ranks: int) -> Tensor:
    """[rank, output, ..] rows to [output, rank, ..]."""
    blocks = [block.split(list(rows)) for block in x.chunk(ranks)]
    return torch.cat([block[output] for output in range(len(rows)) for block in blocks])


def by_rank(x: Tensor, rows: Sequence[int], ranks: int) -> Tensor:
    """[output, rank, ..] rows to [rank, output, ..]."""
    outputs = [part.chunk(ranks) for part in x.split([count * ranks for count in rows])]
    return torch.cat([part[rank] for rank in range(ranks) for part in outputs])


@dataclass(frozen=True)
class Route:
    """Moves of one operand: ``forward`` in forward, ``backward`` for its gradient."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]

    @classmethod
    def of(cls, moves: Sequence[Move], context: ParallelContext, rows: Sequence[int] = ()) -> Route:
        """Args: ``rows`` of each output in the stored part of a fused weight."""
        forward: list[Step] = []
        backward: list[Step] = []
        held = tuple(rows)
        for move in moves:
            group = context.group(move.axes)
            n = math.prod(context.grid.sizes[axis] for axis in move.axes)
            if move.forward != "identity":
                forward.append(Step(move.forward, group, move.dim, move.to_dim, held))
            if move.backward != "identity":
                dims = (move.to_dim, move.dim) if move.backward == "all_to_all" else (move.dim, move.to_dim)
                backward.insert(0, Step(move.backward, group, *dims, held))
            if move.dim == 0 and move.forward == "gather":
                held = tuple(count * n for count in held)
        return cls(tuple(forward), tuple(backward))


def run(steps: Sequence[Step], x: Tensor, *, owned: bool = False) -> Pending:
    """Make the moves; the last one is only started."""
    if not steps:
        return Ready(x)
    for step in steps[:-1]:
        x = step.start(x, owned=owned).wait()
        owned = True
    return steps[-1].start(x, owned=owned)
