"""Rows that were fetched, until a step is over."""

from __future__ import annotations

import torch
from torch import Tensor


class RowCache:
    """Rows of a table by id.

    Args:
        like: [.., dim]: rows are of its dtype, device and width.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like.new_empty((0, like.shape[1]))  # not the memory of the table itself
        self.clear()

    def clear(self) -> None:
        #: ascending, and of each the place of its row
        self._ids = torch.empty(0, dtype=torch.int64, device=self._like.device)
        self._places = self._ids
        self._rows = self._like
        self._used = 0

    def missing(self, ids: Tensor) -> Tensor:
        """Those of some distinct ids, ascending, that are not here."""
        if not len(self._ids) or not len(ids):
            return ids
        at = torch.searchsorted(self._ids, ids).clamp_(max=len(self._ids) - 1)
        return ids[self._ids[at] != ids]

    def add(self, ids: Tensor, rows: Tensor) -> None:
        """Keep rows whose ids are not here yet, in any order. ``rows`` may be kept as they are."""
        if not len(ids):
            return
        if not self._used:
            self._ids, self._places = ids.sort()
            self._rows, self._used = rows, len(ids)
            return
        places = torch.arange(self._used, self._used + len(ids), device=ids.device)
        if self._used + len(ids) > len(self._rows):  # twice as many, so that each row is copied twice at most
            grown = rows.new_empty((2 * (self._used + len(ids)), rows.shape[1]))
            grown[: self._used] = self._rows[: self._used]
            self._rows = grown
        self._rows[self._used : self._used + len(ids)] = rows
        self._used += len(ids)
        self._ids, order = torch.cat((self._ids, ids)).sort()
        self._places = torch.cat((self._places, places))[order]

    def rows_of(self, ids: Tensor) -> Tensor:
        """A copy of the rows [n, dim] of ids that are all here."""
        return self._rows[self._places[torch.searchsorted(self._ids, ids)]]
