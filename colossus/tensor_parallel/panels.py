"""A distributed product in panels of rows: one is multiplied while the next is gathered and the one before is reduced.

This is the loop of SUMMA (van de Geijn and Watts, 1997), for the rows of any product ``reduce(gather(x) @ w.T)`` and
in every mode. Only the gather of the first panel and the reduction of the last have nothing to run beside.

A panel takes an equal part of the rows of each rank. Where rows are gathered over g ranks, the panel's product has g
blocks of rows, each of which belongs into another place of y; where they are reduce-scattered over s ranks, the panel
takes its rows from s places of x, so that each rank gets rows that lie one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colossus.comm.pending import Pending, Ready
from colossus.tensor_parallel.move_plan import BoundCollective, BoundMove, run

#: moves that a panel can make by itself
_OF_PANELS = ("gather", "reduce_scatter", "sum", "identity")


@dataclass(frozen=True)
class Panels:
    """Panels along one dim of rows of a product.

    Attributes:
        count: the number of panels.
        dim: the dim of x and y that they split.
        x_blocks: equal blocks of the dim of x of which a panel takes a part each.
        y_blocks: equal blocks of the dim of y to which a panel adds a part each.
        moved_blocks: equal blocks of the dim of x after its moves, of which a panel is a part each.
        before, after: moves of x and of the product.
    """

    count: int
    dim: int
    x_blocks: int
    y_blocks: int
    moved_blocks: int
    before: tuple[BoundMove, ...]
    after: tuple[BoundMove, ...]

    @classmethod
    def of(cls, most: int, x: Tensor, before: Sequence[BoundMove], after: Sequence[BoundMove]) -> Panels | None:
        """Return the panels of a product, None where it moves nothing or its rows cannot be split.

        Args:
            most: the most panels; the number is the largest up to it that divides the rows.
            x: [.., k], as it is before its moves.
            before: moves of x.
            after: moves of the product.
        """
        if most < 2 or x.ndim < 2 or not (before or after) or torch.compiler.is_compiling():
            return None
        if not all(isinstance(move, BoundCollective) and move.operation in _OF_PANELS for move in (*before, *after)):
            return None
        gathered, scattered = (_factors(moves, x.ndim) for moves in (before, after))
        # a dim that moves comes last: its panels are no neighbours afterwards
        for dim in sorted(range(x.ndim - 1), key=lambda dim: dim in gathered or dim in scattered):
            gathers, scatters = gathered.get(dim, 1), scattered.get(dim, 1)
            if gathers != scatters and 1 not in (gathers, scatters):
                continue
            x_blocks, y_blocks = (1, gathers) if scatters == 1 else (scatters, 1) if gathers == 1 else (1, 1)
            rows = x.shape[dim] // x_blocks
            count = next((number for number in range(min(most, rows), 1, -1) if rows % number == 0), 1)
            if count > 1:
                return cls(count, dim, x_blocks, y_blocks, max(gathers, x_blocks), tuple(before), tuple(after))
        return None

    def multiply(
        self, x: Tensor, w_gathered: Pending, bias: Tensor | None = None, moved: list[Tensor] | None = None
    ) -> Pending:
        """Return ``after(before(x) @ w.T + bias)``; its last moves are only started.

        Args:
            x: [.., k_x], as it is before its moves.
            w_gathered: w [n, k], which may be on its way.
            bias: [n], or None.
            moved: gets the panels of x after their moves, which `join` puts together.
        """
        parts = self._split(x, self.x_blocks)
        y: Tensor | None = None
        reductions: list[Pending] = []
        gather = self._start(parts, 0)
        w = w_gathered.wait()
        for index in range(self.count):
            panel = gather.wait()
            if index + 1 < self.count:
                gather = self._start(parts, index + 1)
            if self.before:
                if moved is not None:
                    moved.append(panel)
                panel = panel.unflatten(self.dim, (self.y_blocks, -1))
            if self.after:
                out = panel.new_empty((*panel.shape[:-1], w.shape[0]))
                self._multiply_into(out, panel, w, bias)
                reductions.append(run(self.after, out.flatten(self.dim, self.dim + 1), owned=True))
                continue
            if y is None:
                rows = panel.shape[self.dim] * panel.shape[self.dim + 1] * self.count
                y = panel.new_empty((*panel.shape[: self.dim], rows, *panel.shape[self.dim + 2 : -1], w.shape[0]))
            self._multiply_into(self._split(y, self.y_blocks).select(self.dim + 1, index), panel, w, bias)
        if y is not None:
            return Ready(y)
        return Pending(lambda: self.join([reduction.wait() for reduction in reductions], self.y_blocks))

    def join(self, panels: Sequence[Tensor], blocks: int) -> Tensor:
        """Return the rows of all panels in their order; a panel has a part of so many blocks of them."""
        split = [panel.unflatten(self.dim, (blocks, -1)) for panel in panels]
        return torch.cat(split, self.dim + 1).flatten(self.dim, self.dim + 1)

    def _split(self, x: Tensor, blocks: int) -> Tensor:
        """Return x with its dim of panels as three: [.., blocks, count, rows of a block and panel, ..]."""
        return x.unflatten(self.dim, (blocks, self.count, -1))

    def _start(self, parts: Tensor, index: int) -> Pending:
        """Start the moves of a panel of x; one that does not move has its blocks as a dim."""
        panel = parts.select(self.dim + 1, index)
        return run(self.before, panel.flatten(self.dim, self.dim + 1)) if self.before else Ready(panel)

    def _multiply_into(self, out: Tensor, x: Tensor, w: Tensor, bias: Tensor | None) -> None:
        """Write ``x @ w.T + bias`` to ``out``; both are [.., blocks, rows, .., features], blocks lie anywhere."""
        rows = out.shape[self.dim + 1 : -1].numel()
        matrices = out.view(-1, rows, out.shape[-1])
        operands = x.reshape(len(matrices), rows, -1), w.t().expand(len(matrices), -1, -1)
        if bias is None:
            torch.bmm(*operands, out=matrices)
        else:
            torch.baddbmm(bias, *operands, out=matrices)


def _factors(moves: Sequence[BoundMove], ndim: int) -> dict[int, int]:
    """Return for each dim of rows the ranks over which it is gathered or scattered."""
    factors: dict[int, int] = {}
    for move in moves:
        assert isinstance(move, BoundCollective)
        if 0 <= move.dim < ndim - 1 and move.operation in ("gather", "reduce_scatter"):
            factors[move.dim] = factors.get(move.dim, 1) * move.group.size
    return factors
