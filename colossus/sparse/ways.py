"""How the gradient of a table is summed over the ranks that share it, where each of them holds all of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from colossus.comm import collectives, uneven
from colossus.context.groups import AxisGroup
from colossus.gradients.bucket_sum import FlatSum, TwoLevelSum
from colossus.rows.row_gradient import RowGradient


class TableSync:
    """Base, and what a rank does that shares a table with no other. Which it is never changes results.

    Args:
        param: as it is stored on this rank: [rows, dim] or its part.
        num_rows: of the whole table.
    """

    def __init__(self, param: nn.Parameter, num_rows: int) -> None:
        self.param, self.num_rows = param, num_rows

    def begin(self) -> None:
        """A step or an evaluation begins: what was fetched before is not relied on."""

    def end(self) -> None:
        """It is over, or was given up."""

    def fetch(self, ids: Tensor) -> Tensor:
        """Rows [n, dim] of distinct ascending ids [n]; collective where rows are elsewhere, but not in a backward."""
        return self.param.detach().index_select(0, ids)

    def read(self, ids: Tensor) -> Tensor:
        """`fetch` of rows that are not wanted again: nothing keeps them."""
        return self.fetch(ids)

    def start_sum(self, gradient: RowGradient, *, is_used: bool) -> Callable[[], RowGradient | None]:
        """Start to sum over the ranks that share the table. Collective.

        Args:
            gradient: of this rank, by ids of the whole table.
            is_used: whether a backward of this rank has come to the table.

        Returns:
            What waits for the sum, of the rows that this rank stores, by their place in ``param``; None where no rank
            has used the table.
        """
        return lambda: gradient if is_used else None


class Dense(TableSync):
    """All-reduce of the gradient of all rows, and of a byte for each row: whether any rank has looked it up.

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
        marks = collectives.all_reduce(touched, self._groups[0], op="max", owned=True, what="ids")

        def finish() -> RowGradient | None:
            found = marks.wait()
            for group in self._groups[1:]:
                found = collectives.all_reduce(found, group, op="max", owned=True, what="ids").wait()
            flat = total.wait().view(self.num_rows, -1)
            ids = found[:-1].nonzero().squeeze(1)
            return RowGradient(ids, flat[ids]) if is_used or found[-1] else None

        return finish


class Gather(TableSync):
    """All-gather of the rows that ranks have touched, as many as each of them has."""

    def __init__(self, param: nn.Parameter, num_rows: int, group: AxisGroup) -> None:
        super().__init__(param, num_rows)
        self._group = group

    def start_sum(self, gradient: RowGradient, *, is_used: bool) -> Callable[[], RowGradient | None]:
        group, device = self._group, gradient.ids.device
        lengths, heard = uneven.agree([len(gradient.ids)] * group.size, group, device, [is_used])
        counts = lengths.received
        ids = uneven.all_gather(gradient.ids, counts, group, "ids")
        rows = uneven.all_gather(gradient.rows.contiguous(), counts, group)

        def finish() -> RowGradient | None:
            total = RowGradient.added(RowGradient.parts(ids.wait(), rows.wait(), counts))
            return total if any(used for (used,) in heard) else None

        return finish
