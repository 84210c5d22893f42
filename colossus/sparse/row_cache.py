"""A cache of the rows of a table that this rank has fetched from their owners."""

from __future__ import annotations

import torch
from torch import Tensor


class RowCache:
    """A cache of rows of a table by id.

    Args:
        like: a tensor [.., dim] of the rows' dtype, device and width.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like.new_empty((0, like.shape[1]))  # a slice would keep the table's memory alive
        self.clear()

    def clear(self) -> None:
        #: the ids, ascending, and the index of each one's row
        self._ids = self._places = torch.empty(0, dtype=torch.int64, device=self._like.device)
        self._rows = self._like

    def missing(self, ids: Tensor) -> Tensor:
        """Return those of some distinct ascending ids that are not in the cache."""
        if not len(self._ids) or not len(ids):
            return ids
        index = torch.searchsorted(self._ids, ids).clamp_(max=len(self._ids) - 1)
        return ids[self._ids[index] != ids]

    def add(self, ids: Tensor, rows: Tensor) -> None:
        """Add rows whose ids are not in the cache yet, in any order. It may keep ``rows`` itself, without a copy."""
        places = torch.arange(len(self._ids), len(self._ids) + len(ids), device=ids.device)
        self._ids, order = torch.cat((self._ids, ids)).sort()
        self._places = torch.cat((self._places, places))[order]
        self._rows = torch.cat((self._rows, rows)) if len(self._rows) else rows

    def rows_of(self, ids: Tensor) -> Tensor:
        """Return a copy of the rows [n, dim] of ids that are all in the cache."""
        return self._rows[self._places[torch.searchsorted(self._ids, ids)]]
