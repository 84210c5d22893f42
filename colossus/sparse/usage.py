"""What a step does with tables, in numbers: bytes by way, rows touched, alpha (the part of a table that is touched)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from colossus.comm import accounting
from colossus.comm.accounting import sent
from colossus.context.parallel_context import ParallelContext
from colossus.gradients.axes import gradient_sum_axes
from colossus.sparse.table import Table
from colossus.sparse.ways.dense import Dense
from colossus.tensor_parallel.dtypes import gradient_dtype


class Usage:
    """Of this rank.

    Args:
        tables: of this rank.
        dense: the parameters whose gradients are all-reduced in buckets.
    """

    def __init__(self, context: ParallelContext, tables: Iterable[Table], dense: Iterable[nn.Parameter]) -> None:
        self._context, self._tables, self._dense = context, list(tables), list(dense)
        self._counter: accounting.Counter | None = None
        self._bytes_dense: float | None = None
        self._last = dict[str, float]()

    def begin(self) -> None:
        """A step begins."""
        self.abandon()
        self._counter = accounting.Counter()
        accounting.listeners.append(self._counter)

    def end(self) -> None:
        """Its gradients are summed."""
        counter = self._counter
        assert counter is not None
        self.abandon()
        self._last = {
            "bytes_dense": self._sent_dense(),
            "bytes_gathered_rows": counter.bytes(operation="all_gather rows"),
            "bytes_owned_rows": counter.bytes(operation="all_to_all rows"),
            **touched(self._tables),
        }

    def abandon(self) -> None:
        """Count no more."""
        if self._counter in accounting.listeners:
            accounting.listeners.remove(self._counter)
        self._counter = None

    def report(self) -> dict[str, float]:
        """Of the last step, by the names of metrics."""
        return dict(self._last)

    def _sent_dense(self) -> float:
        if self._bytes_dense is None:
            params = [*self._dense, *(table.param for table in self._tables if isinstance(table.way, Dense))]
            self._bytes_dense = sum(map(self._all_reduced, params))
        return self._bytes_dense

    def _all_reduced(self, param: nn.Parameter) -> float:
        ranks = self._context.size(gradient_sum_axes(param, self._context))
        return sent("all_reduce", ranks, param.numel() * gradient_dtype(param).itemsize)


def touched(tables: Iterable[Table]) -> dict[str, float]:
    """Rows that this rank has touched in the last step, and alpha of each table, by the names of metrics."""
    listed = list(tables)
    if not listed:
        return {}
    alphas = {f"alpha.{table.name}": table.num_touched / max(1, table.num_rows) for table in listed}
    return {"rows_touched": float(sum(table.num_touched for table in listed)), **alphas}
