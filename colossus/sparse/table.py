"""A table with sparse gradients on a rank: lookups, their gradient, and its sum over the ranks that share the table.

Here each of these ranks has all rows of the table; `colossus.sparse.owners` is for tables whose rows are spread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm import collectives, uneven
from colossus.comm.autograd import first_order, uncompiled
from colossus.context.groups import AxisGroup
from colossus.error_place import located_error
from colossus.gradients.bucket_sum import FlatSum, TwoLevelSum
from colossus.layout.parameter import spec_of
from colossus.layout.parameter_hooks import user_hooks
from colossus.rows.row_gradient import RowGradient
from colossus.rows.row_rules import Features
from colossus.tensor_parallel.dtypes import gradient_dtype


class Table:
    """The `RowSource` of a parameter, between the parameter and the layers that look up in it.

    Attributes:
        name: the full name of the parameter.
        param: the parameter, as this rank stores it.
        num_rows: the rows of the whole table.
        way: fetches rows and sums gradients.
        features: set where each rank has a part of the features.
        num_touched: the number of rows that had a gradient on this rank in the last step.
    """

    def __init__(self, param: nn.Parameter, way: TableSync, features: Features | None = None) -> None:
        self.features = features
        self.name, self.param, self.num_rows, self.way = spec_of(param).name, param, way.num_rows, way
        self._parts: list[RowGradient] = []
        self.num_touched = 0
        self._sum: Callable[[], RowGradient | None] | None = None

    # -- forward and backward -----------------------------------------------------------------------------

    @uncompiled
    def look_up(self, ids: Tensor, padding_idx: int | None = None) -> tuple[Tensor, Tensor]:
        with torch._C.DisableTorchFunctionSubclass():  # a `SplitParameter` stands for this rank's rows here
            return self._look_up(ids, padding_idx)

    def _look_up(self, ids: Tensor, padding_idx: int | None) -> tuple[Tensor, Tensor]:
        distinct, where = torch.unique(ids.long(), return_inverse=True)
        ends = distinct[:: max(1, len(distinct) - 1)].tolist()  # the smallest and the largest, in one read
        if ends and not 0 <= ends[0] <= ends[-1] < self.num_rows:
            bad = ends[0] if ends[0] < 0 else ends[-1]
            raise located_error(
                f"table {self.name!r} has ids 0..{self.num_rows - 1}, but was given id {bad}: make the table larger, "
                f"or check the data"
            )
        if not torch.is_grad_enabled():
            return self.way.fetch(distinct).to(gradient_dtype(self.param)), where
        rows: Tensor = _Rows.apply(self.param, self, distinct, padding_idx)
        return rows, where

    @uncompiled
    def read(self, ids: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.way.read(ids.long())

    def add(self, gradient: RowGradient) -> None:
        """Add to this rank's gradient of the step."""
        self._parts.append(gradient)

    # -- a step -------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Drop the gradients and the fetched rows of the step before.

        Raises:
            ValueError: the parameter has a hook.
        """
        if user_hooks(self.param):
            raise ValueError(
                f"{self.name} has sparse=True and a hook, but hooks do not run on a gradient of the rows that were "
                f"looked up: leave sparse out"
            )
        self._parts, self._sum = [], None
        self.way.begin()

    def start_sum(self) -> None:
        """Start to sum this rank's gradient, which is complete, over ranks. Collective, once in a step.

        Raises:
            ValueError: something else than a lookup has given the parameter a gradient.
        """
        if self.param.grad is not None:
            raise ValueError(
                f"{self.name} has sparse=True, but something else than a lookup gave it a gradient in this step (a "
                f"product with its rows, a head or a penalty that uses them): leave sparse out"
            )
        ids = torch.empty(0, dtype=torch.int64, device=self.param.device)
        rows = torch.empty((0, self.param.shape[1]), dtype=gradient_dtype(self.param), device=self.param.device)
        is_used = bool(self._parts)  # a backward has come here, possibly without a row
        own = RowGradient.added(self._parts or [RowGradient(ids, rows)])
        self.num_touched = len(own.ids)
        self._parts = []
        self._sum = self.way.start_sum(own, is_used=is_used)

    def finish_sum(self) -> None:
        """Set ``param.grad`` to the sum over ranks of this rank's rows, as coalesced COO.

        It is None where no rank has used the table.
        """
        if self._sum is None:
            self.start_sum()
        assert self._sum is not None
        total, self._sum = self._sum(), None
        self.param.grad = None if total is None else total.as_sparse(self.param.shape[0])
        self.way.end()


class _Rows(torch.autograd.Function):
    """Rows [n, dim] of distinct ids [n], whose gradient goes to the table and not to ``param``."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, table: Table, ids: Tensor, padding_idx: int | None) -> Tensor:
        ctx.table, ctx.ids, ctx.padding_idx = table, ids, padding_idx
        return table.way.fetch(ids).to(gradient_dtype(param))

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[None, ...]:
        ids = ctx.ids
        if ctx.padding_idx is not None:
            has_gradient = ids != ctx.padding_idx
            ids, dy = ids[has_gradient], dy[has_gradient]
        ctx.table.add(RowGradient(ids, dy))
        return None, None, None, None


class TableSync:
    """The way of a table that one rank has alone, and the base of the others. All ways give the same results.

    Args:
        param: the rows of the table that this rank stores, [rows, dim].
        num_rows: the rows of the whole table.
    """

    def __init__(self, param: nn.Parameter, num_rows: int) -> None:
        self.param, self.num_rows = param, num_rows

    def begin(self) -> None:
        """Begin a step or an evaluation; rows that were fetched before are not used again."""

    def end(self) -> None:
        """End a step or an evaluation, also one that raised."""

    def fetch(self, ids: Tensor) -> Tensor:
        """Return the rows [n, dim] of distinct ascending ids [n].

        Collective where other ranks store rows, except in a recomputation.
        """
        return self.param.detach().index_select(0, ids)

    def read(self, ids: Tensor) -> Tensor:
        """Return rows as `fetch` does, without a cache."""
        return self.fetch(ids)

    def start_sum(self, gradient: RowGradient, *, is_used: bool) -> Callable[[], RowGradient | None]:
        """Start to sum over the ranks that share the table. Collective.

        Args:
            gradient: this rank's gradient, by ids of the whole table.
            is_used: whether a backward of this rank has come to the table.

        Returns:
            A function that waits for the sum of the rows that this rank stores, and returns it by their index in
            ``param``; None where no rank has used the table.
        """
        return lambda: gradient if is_used else None


class Dense(TableSync):
    """An all-reduce of the gradient of all rows, and of one byte for each row: whether a rank has looked it up.

    Args:
        param: the table.
        num_rows: its rows.
        groups: the ranks that share the table; or those of this host, and their counterparts on all hosts.
    """

    def __init__(self, param: nn.Parameter, num_rows: int, groups: Sequence[AxisGroup]) -> None:
        super().__init__(param, num_rows)
        self._groups = groups
        self._sum = FlatSum(groups[0]) if len(groups) == 1 else TwoLevelSum(groups[0], groups[1])

    def start_sum(self, gradient: RowGradient, *, is_used: bool) -> Callable[[], RowGradient | None]:
        rows = gradient.rows
        whole = rows.new_zeros((self.num_rows, rows.shape[1]))
        whole[gradient.ids] = rows
        touched = torch.zeros(self.num_rows + 1, dtype=torch.uint8, device=rows.device)
        touched[gradient.ids] = 1
        if is_used:
            touched[-1].fill_(1)
        total = self._sum.start(whole.view(-1))
        marks = collectives.all_reduce(touched, self._groups[0], op="max", owned=True, what="ids")

        def finish() -> RowGradient | None:
            is_touched = marks.wait()
            for group in self._groups[1:]:
                is_touched = collectives.all_reduce(is_touched, group, op="max", owned=True, what="ids").wait()
            flat = total.wait().view(self.num_rows, -1)
            ids = is_touched[:-1].nonzero().squeeze(1)
            return RowGradient(ids, flat[ids]) if is_used or is_touched[-1] else None

        return finish


class Gather(TableSync):
    """An all-gather of the rows that have a gradient on some rank."""

    def __init__(self, param: nn.Parameter, num_rows: int, group: AxisGroup) -> None:
        super().__init__(param, num_rows)
        self._group = group

    def start_sum(self, gradient: RowGradient, *, is_used: bool) -> Callable[[], RowGradient | None]:
        group, device = self._group, gradient.ids.device
        lengths, used_flags = uneven.agree([len(gradient.ids)] * group.size, group, device, [is_used])
        counts = lengths.received
        ids = uneven.all_gather(gradient.ids, counts, group, "ids")
        rows = uneven.all_gather(gradient.rows.contiguous(), counts, group)

        def finish() -> RowGradient | None:
            total = RowGradient.added(RowGradient.parts(ids.wait(), rows.wait(), counts))
            return total if any(used for (used,) in used_flags) else None

        return finish
