"""The whole gradient is all-reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from colossus.comm import collectives
from colossus.context.groups import AxisGroup
from colossus.gradients.bucket_sum import FlatSum, TwoLevelSum
from colossus.rows.row_gradient import RowGradient
from colossus.sparse.ways.table_sync import TableSync


class Dense(TableSync):
    """The gradient of all rows, and apart from it a byte for each row: whether any rank has looked it up.

    Args:
        groups: the ranks that share the table; or those inside of a host, and their counterparts on all hosts.
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
        marks = [collectives.all_reduce(touched, self._groups[0], op="max", owned=True, what="ids")]

        def finish() -> RowGradient | None:
            found = marks[0].wait()
            for group in self._groups[1:]:
                found = collectives.all_reduce(found, group, op="max", owned=True, what="ids").wait()
            flat = total.wait().view(self.num_rows, -1)
            ids = found[:-1].nonzero().squeeze(1)
            return RowGradient(ids, flat[ids]) if is_used or found[-1] else None

        return finish
