"""What all ways in which ranks that share a table come to the same rows have in common."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from colossus.rows.row_gradient import RowGradient


class TableSync:
    """Base, and what a rank does that shares a table with no other. Which it is never changes results.

    Args:
        param: as it is stored on this rank: [rows, dim] or its part.
        num_rows: of the whole table.
    """

    def __init__(self, param: nn.Parameter, num_rows: int) -> None:
        self.param, self.num_rows = param, num_rows

    def begin(self) -> None:
        """A step or an evaluation begins: what was fetched before is not relied on."""

    def end(self) -> None:
        """It is over, or was given up."""

    def fetch(self, ids: Tensor) -> Tensor:
        """Rows [n, dim] of distinct ascending ids [n]; collective where rows are elsewhere, but not in a backward."""
        return self.param.detach().index_select(0, ids)

    def read(self, ids: Tensor) -> Tensor:
        """`fetch` of rows that are not wanted again: nothing keeps them."""
        return self.fetch(ids)

    def fail(self) -> None:
        """In the place of `fetch` on a rank that cannot: the others hear of it."""

    def start_sum(self, gradient: RowGradient, *, is_used: bool) -> Callable[[], RowGradient | None]:
        """Start to sum over the ranks that share the table. Collective.

        Args:
            gradient: of this rank, by ids of the whole table.
            is_used: whether a backward of this rank has come to the table.

        Returns:
            What waits for the sum, of the rows that this rank stores, by their place in ``param``; None where no rank
            has used the table.
        """
        return lambda: gradient if is_used else None
