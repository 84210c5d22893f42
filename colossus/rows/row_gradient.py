"""The gradient of some rows of a table, and the interface by which a lookup gets these rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowGradient:
    """The gradient of some rows of a table [num_rows, dim].

    Attributes:
        ids: int64 [n], the distinct rows that have a gradient, ascending.
        rows: [n, dim], their gradients.
    """

    ids: Tensor
    rows: Tensor

    @classmethod
    def added(cls, parts: Sequence[RowGradient]) -> RowGradient:
        """Return the sum of one or more gradients; the parts of a row are added in their order."""
        if len(parts) == 1:
            return parts[0]
        ids, where = torch.unique(torch.cat([part.ids for part in parts]), return_inverse=True)
        rows = parts[0].rows.new_zeros((len(ids), parts[0].rows.shape[1]))
        start = 0
        for part in parts:  # one after the other, so that every rank adds in the order of the parts
            rows.index_add_(0, where[start : start + len(part.ids)], part.rows)
            start += len(part.ids)
        return cls(ids, rows)

    @classmethod
    def parts(cls, ids: Tensor, rows: Tensor, lengths: Sequence[int]) -> list[RowGradient]:
        """Cut concatenated gradients into parts of these numbers of rows."""
        sizes = list(lengths)
        return [cls(*part) for part in zip(ids.split(sizes), rows.split(sizes), strict=True)]

    def as_sparse(self, num_rows: int) -> Tensor:
        """Return torch's form of it, coalesced COO [num_rows, dim], which shares the memory."""
        shape = (num_rows, self.rows.shape[1])
        return torch.sparse_coo_tensor(
            self.ids.unsqueeze(0), self.rows, shape, is_coalesced=True, check_invariants=False
        )


class RowSource(Protocol):
    """The way by which a layer looks up rows of a table with sparse gradients.

    An engine attaches it to the table's parameter, since a rank may store a part of the table, or other rows than those
    that it looks up.
    """

    def look_up(self, ids: Tensor, padding_idx: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the rows of some ids, each row once.

        Args:
            ids: integers of the whole table, any shape.
            padding_idx: an id whose row gets no gradient.

        Returns:
            The rows [distinct ids, dim], under autograd, in the dtype in which the table's gradients are summed; and
            the index of each id among them, of the shape of ``ids``.

        Raises:
            ValueError: an id is not in the table.
        """
        ...

    def read(self, ids: Tensor) -> Tensor:
        """Return rows [n, dim] of distinct ascending ids [n], without a gradient and without a copy for later."""
        ...


def row_source(table: Tensor) -> RowSource | None:
    """Return the row source of a table, or None where its parameter has all rows and autograd makes the gradient."""
    source: RowSource | None = getattr(table, "_colossus_rows", None)
    return source


def set_row_source(table: Tensor, source: RowSource) -> None:
    table._colossus_rows = source  # type: ignore[attr-defined]
