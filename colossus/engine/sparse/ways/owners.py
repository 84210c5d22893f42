"""Each rank holds and updates rows of its own, and looks up those of others by an exchange."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from colossus.comm.uneven import exchange
from colossus.engine.sparse.ways.way import Way
from colossus.rows.row_gradient import RowGradient


class Owners(Way):
    """Rows are cut over the group, ceil(rows / ranks) each, but for the last ranks.

    A step fetches each row once: what one microbatch has fetched the next one finds (``begin_step`` forgets it).
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._per_rank = -(-self.num_rows // self.group.size)
        self.begin_step()

    def begin_step(self) -> None:
        param = self.param
        self._ids = torch.empty(0, dtype=torch.int64, device=param.device)
        self._rows = param.new_empty((0, param.shape[1]), requires_grad=False)

    def _counts(self, ids: Tensor) -> list[int]:
        """How many of some ascending ids each rank owns."""
        bounds = torch.arange(1, self.group.size, device=ids.device) * self._per_rank
        ends = [0, *torch.searchsorted(ids, bounds).tolist(), len(ids)]
        return [stop - start for start, stop in pairwise(ends)]

    def fetch(self, ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return super().fetch(ids)
        known = torch.isin(ids, self._ids, assume_unique=True)
        new = ids[~known]
        wanted = exchange(new, self._counts(new), self.group)
        found = self.param.detach().index_select(0, torch.cat(wanted) - self.group.index * self._per_rank)
        rows = torch.cat(exchange(found, [len(part) for part in wanted], self.group))
        order = torch.argsort(torch.cat((self._ids, new)))
        self._ids, self._rows = torch.cat((self._ids, new))[order], torch.cat((self._rows, rows))[order]
        return self._rows[torch.searchsorted(self._ids, ids)]

    def total(self, gradient: RowGradient) -> RowGradient:
        if self.group.size == 1:
            return gradient
        counts = self._counts(gradient.ids)
        ids = exchange(gradient.ids, counts, self.group)
        rows = exchange(gradient.rows, counts, self.group)
        total = RowGradient.added([RowGradient(*part) for part in zip(ids, rows, strict=True)])
        return RowGradient(total.ids - self.group.index * self._per_rank, total.rows)
