"""Every rank gets the rows of all others."""

from __future__ import annotations

import torch
from torch import Tensor

from colossus.comm import collectives
from colossus.engine.sparse.ways.way import Way
from colossus.rows.row_gradient import RowGradient


class Gather(Way):
    """All-gather of the rows that ranks have touched, filled up to the most that one of them has."""

    def total(self, gradient: RowGradient) -> RowGradient:
        if self.group.size == 1:
            return gradient
        own = torch.tensor([len(gradient.ids)], device=gradient.ids.device)
        counts = collectives.all_gather(own, self.group).wait().tolist()
        most = max(counts)
        ids = collectives.all_gather(_filled(gradient.ids, most), self.group)
        rows = collectives.all_gather(_filled(gradient.rows, most), self.group)
        gathered = zip(ids.wait().split(most), rows.wait().split(most), counts, strict=True) if most else ()
        return RowGradient.added([RowGradient(i[:count], r[:count]) for i, r, count in gathered] or [gradient])


def _filled(x: Tensor, size: int) -> Tensor:
    if len(x) == size:
        return x
    return torch.cat((x, x.new_zeros((size - len(x), *x.shape[1:]))))
