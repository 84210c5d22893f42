"""A table of embeddings on a rank: lookups in it, and the gradient that they leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm.autograd import first_order, uncompiled
from colossus.context.parallel_context import ParallelContext
from colossus.error_place import located_error
from colossus.layout.parameter import spec_of
from colossus.rows.row_gradient import RowGradient
from colossus.rows.row_rules import Features
from colossus.sparse.ways import TableSync
from colossus.tensor_parallel.dtypes import gradient_dtype


class Table:
    """What stands between the layers that look up in a parameter and the parameter (a `RowSource`).

    Attributes:
        name: full name of the parameter.
        param: as this rank stores it.
        num_rows: of the whole table.
        way: where rows are, and how gradients are summed.
        features: where ranks have parts of them.
        num_touched: rows to which this rank gave a gradient in the last step.
    """

    def __init__(
        self, param: nn.Parameter, way: TableSync, context: ParallelContext, features: Features | None = None
    ) -> None:
        self.features, self._context = features, context
        self.name, self.param, self.num_rows, self.way = spec_of(param).name, param, way.num_rows, way
        self._parts: list[RowGradient] = []
        self.num_touched = 0
        self._sum: Callable[[], RowGradient | None] | None = None

    # -- forward and backward -----------------------------------------------------------------------------

    @uncompiled
    def look_up(self, ids: Tensor, padding_idx: int | None = None) -> tuple[Tensor, Tensor]:
        with torch._C.DisableTorchFunctionSubclass():  # a `SplitParameter` is here what it is
            return self._look_up(ids, padding_idx)

    def _look_up(self, ids: Tensor, padding_idx: int | None) -> tuple[Tensor, Tensor]:
        distinct, where = torch.unique(ids.long(), return_inverse=True)
        ends = distinct[:: max(1, len(distinct) - 1)].tolist()  # the smallest and the largest, in one read
        if ends and not 0 <= ends[0] <= ends[-1] < self.num_rows:
            raise located_error(_in_words(self.name, ids, self.num_rows, self._context))
        if not torch.is_grad_enabled():
            return self.way.fetch(distinct).to(gradient_dtype(self.param)), where
        rows: Tensor = _Rows.apply(self.param, self, distinct, padding_idx)
        return rows, where

    def require_ids(self, ids: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_rows:
                raise located_error(_in_words(self.name, ids, self.num_rows, self._context))

    @uncompiled
    def read(self, ids: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.way.read(ids.long())

    def add(self, gradient: RowGradient) -> None:
        """Add to the gradient of this rank in this step."""
        self._parts.append(gradient)

    # -- a step -------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget gradients, and the rows that were fetched."""
        self._parts, self._sum = [], None
        self.way.begin()

    def start_sum(self) -> None:
        """The gradients of this rank are complete: start to sum them over ranks. Collective, once in a step.

        Raises:
            ValueError: where something else than a lookup has given the parameter a gradient.
        """
        if self.param.grad is not None:
            raise ValueError(
                f"{self.name} has sparse=True, but something else than a lookup gave it a gradient in this step (a "
                f"product with its rows, a head or a penalty that uses them): leave sparse out"
            )
        ids = torch.empty(0, dtype=torch.int64, device=self.param.device)
        rows = torch.empty((0, self.param.shape[1]), dtype=gradient_dtype(self.param), device=self.param.device)
        is_used = bool(self._parts)  # a backward has come here, be it with no row
        own = RowGradient.added(self._parts or [RowGradient(ids, rows)])
        self.num_touched = len(own.ids)
        self._parts = []
        self._sum = self.way.start_sum(own, is_used=is_used)

    def finish_sum(self) -> None:
        """Let ``param.grad`` be the sum over ranks of the rows that this one stores, as coalesced COO; None where no
        rank has used the table."""
        if self._sum is None:
            self.start_sum()
        assert self._sum is not None
        total, self._sum = self._sum(), None
        self.param.grad = None if total is None else total.as_sparse(self.param.shape[0])
        self.way.end()


class _Rows(torch.autograd.Function):
    """param [stored rows, dim], distinct ids [n] -> rows [n, dim]; their gradient goes to the table, not to param."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, table: Table, ids: Tensor, padding_idx: int | None) -> Tensor:
        ctx.table, ctx.ids, ctx.padding_idx = table, ids, padding_idx
        return table.way.fetch(ids).to(gradient_dtype(param))

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[None, ...]:
        ids = ctx.ids
        if ctx.padding_idx is not None:
            kept = ids != ctx.padding_idx
            ids, dy = ids[kept], dy[kept]
        ctx.table.add(RowGradient(ids, dy))
        return None, None, None, None


def _in_words(name: str, ids: Tensor, num_rows: int, context: ParallelContext) -> str:
    """Which rank was given the first such id, in which row of its batch.

    Args:
        ids: of a microbatch, [samples, ..].
    """
    place = ((ids < 0) | (ids >= num_rows)).nonzero()[0].tolist()
    microbatch = context.rng.microbatch
    where = "its only id"
    if place:
        row = microbatch * len(ids) + place[0]
        inside = f", place {', '.join(map(str, place[1:]))} of it" if place[1:] else ""
        where = f"row {row} of its batch{inside}" + (f" (microbatch {microbatch})" if microbatch else "")
    return (
        f"table {name!r} has ids 0..{num_rows - 1}, but rank {context.rank} was given id {int(ids[tuple(place)])} in "
        f"{where}: make the table larger, or check the data"
    )
