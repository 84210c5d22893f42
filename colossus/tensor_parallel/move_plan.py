"""The moves of one operand of a matmul, bound to the groups of a context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from colossus.comm.conjugate import start
from colossus.comm.pending import Pending, Ready
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.context.precision import Precision
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.layout.moves import Move, moves
from colossus.layout.parameter import spec_of
from colossus.tensor_parallel.dtypes import gradient_dtype


class BoundMove(Protocol):
    """A move of a tensor, bound to its ranks. ``start`` starts it; ``owned``: it may overwrite the tensor."""

    def start(self, x: Tensor, *, owned: bool) -> Pending: ...


@dataclass(frozen=True)
class BoundCollective:
    """One move over the ranks of a group.

    Attributes:
        rows: for a fused weight, the rows of dim 0 that each output has in a rank's shard; else empty.
    """

    operation: str
    group: AxisGroup
    dim: int
    to_dim: int = -1
    rows: tuple[int, ...] = ()

    def start(self, x: Tensor, *, owned: bool) -> Pending:
        if len(self.rows) < 2 or self.dim != 0:
            return start(self.operation, x, self.group, self.dim, self.to_dim, owned=owned)
        outputs, ranks = len(self.rows), self.group.size
        if len(set(self.rows)) == 1:  # a dim of outputs: only the collective copies
            return start(self.operation, x.unflatten(0, (outputs, -1)), self.group, 1).then(lambda y: y.flatten(0, 1))
        if self.operation == "gather":
            return start("gather", x, self.group, 0).then(lambda y: to_output_major(y, self.rows, ranks))
        return start(self.operation, to_rank_major(x, self.rows, ranks), self.group, 0)


def to_output_major(x: Tensor, rows: Sequence[int], ranks: int) -> Tensor:
    """Return rows of order [rank, output] in order [output, rank], as a copy.

    Args:
        rows: rows of each output on one rank.
    """
    shards = [shard.split(list(rows)) for shard in x.chunk(ranks)]
    return torch.cat([shard[output] for output in range(len(rows)) for shard in shards])


def to_rank_major(x: Tensor, rows: Sequence[int], ranks: int) -> Tensor:
    """Return rows of order [output, rank] in order [rank, output], as a copy.

    Args:
        rows: rows of each output on one rank.
    """
    outputs = [output.chunk(ranks) for output in x.split([count * ranks for count in rows])]
    return torch.cat([output[rank] for rank in range(ranks) for output in outputs])


@dataclass(frozen=True)
class MovePlan:
    """The moves of one operand (``forward``) and of its gradient (``backward``), each in their order."""

    forward: tuple[BoundMove, ...]
    backward: tuple[BoundMove, ...]

    @classmethod
    def of(cls, moves: Sequence[Move], context: ParallelContext, rows: Sequence[int] = ()) -> MovePlan:
        """Bind moves to the groups of a context.

        Args:
            rows: for a fused weight, the rows that each output has in the rank's stored shard.
        """
        forward: list[BoundCollective] = []
        backward: list[BoundCollective] = []
        local_rows = tuple(rows)
        for move in moves:
            group = context.group(move.axes)
            n = context.size(move.axes)
            if move.forward != "identity":
                forward.append(BoundCollective(move.forward, group, move.dim, move.to_dim, local_rows))
            if move.backward != "identity":
                dims = (move.to_dim, move.dim) if move.backward == "all_to_all" else (move.dim, move.to_dim)
                backward.insert(0, BoundCollective(move.backward, group, *dims, local_rows))
            if move.dim == 0 and move.forward == "gather":
                local_rows = tuple(count * n for count in local_rows)
        return cls(tuple(forward), tuple(backward))

    @classmethod
    def of_tokens(cls, source: Activation, target: Activation, ndim: int, context: ParallelContext) -> MovePlan:
        """Bind the moves of one number a token (a label, a document), which has no features.

        Args:
            source, target: layouts of activations with ``ndim`` dims, of which the numbers have all but the last.
        """
        layouts = (Layout(activation.rows().at(ndim).dims[:-1]) for activation in (source, target))
        return cls.of(moves(*layouts), context)


def groups_of(*plans: MovePlan) -> tuple[AxisGroup, ...]:
    """Return the groups of the moves of several operands, each once."""
    moves = [move for plan in plans for move in (*plan.forward, *plan.backward)]
    return tuple(dict.fromkeys(move.group for move in moves if isinstance(move, BoundCollective)))


def note_weight(groups: Sequence[AxisGroup], weight: Tensor) -> None:
    """Record in these groups that the next collectives belong to products of ``weight``."""
    if not groups or torch.compiler.is_compiling():
        return
    subject = spec_of(weight).subject
    for group in groups:
        group.program.note(subject)


def reduce_wgrad(weight: Tensor, gradient: Tensor, plan: MovePlan, precision: Precision) -> Pending:
    """Return the rank's shard of a weight's gradient, from its share of the sum, which may be overwritten.

    The sum over ranks is taken in the precision's dtype of reduction; the shard has that of ``weight.grad``.
    """
    dtype = gradient_dtype(weight)
    if not plan.backward:
        return Ready(gradient.to(dtype))
    total = run(plan.backward, gradient.to(precision.reduce_dtype(dtype)), owned=True)
    return total if precision.reduce_dtype(dtype) == dtype else total.then(lambda shard: shard.to(dtype))


def moved_shape(shape: torch.Size, moves: Sequence[BoundMove]) -> torch.Size:
    """Return the shape of a tensor of this shape after its moves."""
    sizes = list(shape)
    for move in moves:
        if isinstance(move, BoundCollective):
            if move.operation in ("gather", "pad", "all_to_all"):
                sizes[move.dim] *= move.group.size
            if move.operation in ("reduce_scatter", "slice", "all_to_all"):
                sizes[move.to_dim if move.operation == "all_to_all" else move.dim] //= move.group.size
    return torch.Size(sizes)


def run(moves: Sequence[BoundMove], x: Tensor, *, owned: bool = False) -> Pending:
    """Run the moves; the last one is only started. ``owned``: ``x`` may be overwritten."""
    if not moves:
        return Ready(x)
    for move in moves[:-1]:
        x = move.start(x, owned=owned).wait()
        owned = True
    return moves[-1].start(x, owned=owned)
