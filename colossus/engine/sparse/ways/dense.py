"""The whole gradient is all-reduced."""

from __future__ import annotations

from colossus.comm import collectives
from colossus.engine.sparse.ways.way import Way
from colossus.rows.row_gradient import RowGradient


class Dense(Way):
    """The gradient of all rows, and behind each row whether any rank has looked it up: [rows, dim + 1]."""

    def total(self, gradient: RowGradient) -> RowGradient:
        if self.group.size == 1:
            return gradient
        dim = gradient.rows.shape[1]
        whole = gradient.rows.new_zeros((self.num_rows, dim + 1))
        whole[gradient.ids, :dim] = gradient.rows
        whole[gradient.ids, dim] = 1
        whole = collectives.all_reduce(whole, self.group, owned=True).wait()
        ids = whole[:, dim].nonzero().squeeze(1)
        return RowGradient(ids, whole[ids, :dim])
