"""Where a lookup finds the rows of a table, and the gradient of these rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowGradient:
    """Of a table [rows, dim].

    Attributes:
        ids: int64 [touched], ascending, each once.
        rows: [touched, dim], the gradient of each of these rows.
    """

    ids: Tensor
    rows: Tensor

    @classmethod
    def added(cls, parts: Sequence[RowGradient]) -> RowGradient:
        """The sum of several: of one row in the order of the parts. At least one part."""
        if len(parts) == 1:
            return parts[0]
        ids, where = torch.unique(torch.cat([part.ids for part in parts]), return_inverse=True)
        rows = parts[0].rows.new_zeros((len(ids), parts[0].rows.shape[1]))
        start = 0
        for part in parts:  # one after the other: the order of the sum is that of the parts on every rank
            rows.index_add_(0, where[start : start + len(part.ids)], part.rows)
            start += len(part.ids)
        return cls(ids, rows)

    @classmethod
    def parts(cls, ids: Tensor, rows: Tensor, lengths: Sequence[int]) -> list[RowGradient]:
        """Several, of so many rows each, that lie one below the other."""
        sizes = list(lengths)
        return [cls(*part) for part in zip(ids.split(sizes), rows.split(sizes), strict=True)]

    def as_sparse(self, num_rows: int) -> Tensor:
        """As torch has it: coalesced COO [num_rows, dim]. The same memory."""
        shape = (num_rows, self.rows.shape[1])
        return torch.sparse_coo_tensor(
            self.ids.unsqueeze(0), self.rows, shape, is_coalesced=True, check_invariants=False
        )


class RowSource(Protocol):
    """Of a table whose gradient is of rows: what an engine puts between a layer and the parameter that it holds.

    A rank may hold a part of the table, or other rows than those that it looks up.
    """

    def look_up(self, ids: Tensor, padding_idx: int | None = None) -> tuple[Tensor, Tensor]:
        """The rows of some ids, each row once.

        Args:
            ids: integers of the whole table, any shape.
            padding_idx: an id whose row gets no gradient.

        Returns:
            rows [distinct ids, dim], under autograd, in the dtype in which the gradients of the table are summed; and
            of each id its place among them, of the shape of ``ids``.

        Raises:
            ValueError: for an id that is not in the table.
        """
        ...

    def read(self, ids: Tensor) -> Tensor:
        """Rows [n, dim] of distinct ascending ids [n], without a gradient; nothing keeps them."""
        ...


def row_source(table: Tensor) -> RowSource | None:
    """What lookups in a table ask; None: the parameter itself has all rows, and autograd makes its gradient."""
    source: RowSource | None = getattr(table, "_colossus_rows", None)
    return source


def give_row_source(table: Tensor, source: RowSource) -> None:
    table._colossus_rows = source  # type: ignore[attr-defined]
