"""Where a lookup finds the rows of a table, and leaves their gradients."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


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

    def require_ids(self, ids: Tensor) -> None:
        """That ids [samples of a microbatch, ..] are in the table. A lookup asks so itself; this is for ids of which it
        gets a part, or another order, since the error names their place.

        Raises:
            ValueError: for an id that is not; where rows are exchanged the other ranks raise, too.
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
