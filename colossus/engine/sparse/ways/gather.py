"""Every rank gets the rows of all others."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from colossus.comm import uneven
from colossus.context.groups import AxisGroup
from colossus.engine.sparse.ways.way import Way
from colossus.rows.row_gradient import RowGradient


class Gather(Way):
    """All-gather of the rows that ranks have touched, as many as each of them has.

    Args:
        group: the ranks that share the table.
    """

    def __init__(self, param: nn.Parameter, num_rows: int, group: AxisGroup) -> None:
        super().__init__(param, num_rows)
        self._group = group

    def start_sum(self, gradient: RowGradient, *, is_used: bool) -> Callable[[], RowGradient | None]:
        group, device = self._group, gradient.ids.device
        lengths, heard = uneven.agree([len(gradient.ids)] * group.size, group, device, [is_used])
        counts = list(lengths.received)
        ids = uneven.all_gather(gradient.ids, counts, group, "ids")
        rows = uneven.all_gather(gradient.rows.contiguous(), counts, group)

        def finish() -> RowGradient | None:
            parts = zip(ids.wait().split(counts), rows.wait().split(counts), strict=True)
            total = RowGradient.added([RowGradient(*part) for part in parts])
            return total if any(used for (used,) in heard) else None

        return finish
