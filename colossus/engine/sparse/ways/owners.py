"""Each rank holds and updates rows of its own, and looks up those of others by an exchange."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colossus.comm.uneven import exchange
from colossus.engine.sparse.placement import Placement
from colossus.engine.sparse.ways.way import Way
from colossus.rows.row_gradient import RowGradient

#: into how many partitions the rows of an owner are cut
PARTS_PER_OWNER = 8


class Owners(Way):
    """Each partition of a table is stored by its owner (`Placement`).

    A step fetches each row once: what one microbatch has fetched the next one finds (``begin_step`` forgets it).
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.place(Placement.equal(self.num_rows, self.group.size, PARTS_PER_OWNER * self.group.size))
        self.begin_step()

    def place(self, placement: Placement) -> None:
        """Rows are where a placement says from now on."""
        device = self.param.device
        self.placement = placement
        self._bounds = torch.tensor(placement.bounds[1:], device=device)
        self._owners = torch.tensor(placement.owners, device=device)
        #: of each partition, what its owner subtracts from an id
        starts = torch.tensor(placement.bounds[:-1], device=device)
        self._shifts = starts - torch.tensor(placement.offsets, device=device)

    def begin_step(self) -> None:
        param = self.param
        self._ids = torch.empty(0, dtype=torch.int64, device=param.device)
        self._rows = param.new_empty((0, param.shape[1]), requires_grad=False)

    def _partitions(self, ids: Tensor) -> Tensor:
        return torch.searchsorted(self._bounds, ids, right=True)

    def _by_owner(self, ids: Tensor) -> tuple[Tensor, list[int]]:
        """What sorts ids by their owners, and how many each of these has."""
        owners = self._owners[self._partitions(ids)]
        return torch.argsort(owners, stable=True), torch.bincount(owners, minlength=self.group.size).tolist()

    def _stored(self, ids: Tensor) -> Tensor:
        """The places of ids of this owner among the rows that it stores."""
        return ids - self._shifts[self._partitions(ids)]

    def fetch(self, ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return super().fetch(ids)
        known = torch.isin(ids, self._ids, assume_unique=True)
        new = ids[~known]
        by_owner, counts = self._by_owner(new)
        new = new[by_owner]
        wanted = exchange(new, counts, self.group)
        found = self.param.detach().index_select(0, self._stored(torch.cat(wanted)))
        rows = torch.cat(exchange(found, [len(part) for part in wanted], self.group))
        order = torch.argsort(torch.cat((self._ids, new)))
        self._ids, self._rows = torch.cat((self._ids, new))[order], torch.cat((self._rows, rows))[order]
        return self._rows[torch.searchsorted(self._ids, ids)]

    def total(self, gradient: RowGradient) -> RowGradient:
        if self.group.size == 1:
            return gradient
        by_owner, counts = self._by_owner(gradient.ids)
        ids = exchange(gradient.ids[by_owner], counts, self.group)
        rows = exchange(gradient.rows[by_owner], counts, self.group)
        total = RowGradient.added([RowGradient(*part) for part in zip(ids, rows, strict=True)])
        return RowGradient(self._stored(total.ids), total.rows)
