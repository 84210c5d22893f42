"""The seam of the ways."""

from __future__ import annotations

from torch import Tensor, nn

from colossus.context.groups import AxisGroup
from colossus.rows.row_gradient import RowGradient


class Way:
    """Base: every rank holds the table, and its gradient is summed somehow. Never changes results.

    Args:
        param: as it is stored on this rank: [rows, dim] or its part.
        num_rows: of the whole table.
        group: the ranks over which the gradient is a partial sum: those that look up other ids.
    """

    def __init__(self, param: nn.Parameter, num_rows: int, group: AxisGroup) -> None:
        self.param, self.num_rows, self.group = param, num_rows, group

    def begin_step(self) -> None:
        """What was fetched before is not relied on."""

    def fetch(self, ids: Tensor) -> Tensor:
        """Rows [n, dim] of distinct ascending ids [n]; collective where rows are elsewhere."""
        return self.param.detach().index_select(0, ids)

    def total(self, gradient: RowGradient) -> RowGradient:
        """The sum over the group, of the rows that this rank stores, by their place in ``param``. Collective."""
        raise NotImplementedError
