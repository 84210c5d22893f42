"""Rows of parameters cut over ranks: copies of many ranks at once, beside one element after the other."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from colossus.data_parallel.zero import flat_rows
from colossus.data_parallel.zero.row_layout import RowLayout

#: rows of the shards of a parameter, and the elements of a row
PARAMETERS = st.tuples(st.lists(st.integers(0, 7), min_size=1, max_size=3), st.integers(1, 3))


def expected_rows(layout: RowLayout, wholes: list[Tensor | None], ranks: int) -> Tensor:
    """Return the rows of all ranks, element by element; padding and parameters without a value are 0."""
    rows = torch.zeros(ranks, layout.size)
    for piece in layout.pieces:
        whole = wholes[piece.index]
        for index in range(0 if whole is None else piece.count):
            assert whole is not None
            rank, place = divmod(index, piece.width)
            rows[rank, piece.offset + place] = whole[piece.start + index]
    return rows


@given(st.lists(PARAMETERS, min_size=1, max_size=3), st.integers(1, 6), st.integers(0, 3), st.data())
def test_rows_of_many_ranks_are_copied_at_once(
    sizes: list[tuple[list[int], int]], ranks: int, missing: int, data: st.DataObject
) -> None:
    params = [nn.Parameter(torch.rand(sum(rows), width) + 1) for rows, width in sizes]
    shards = {}
    for param, (rows, _) in zip(params, sizes, strict=True):
        stops = torch.tensor(rows).cumsum(0).tolist()
        spans = [(stop - count, stop) for stop, count in zip(stops, rows, strict=True)]
        shards[param] = SimpleNamespace(shards=[SimpleNamespace(rows=span) for span in spans])
    with patch.object(flat_rows, "spec_of", shards.__getitem__):
        layout = RowLayout(params, ranks)
    wholes = [None if number == missing else param.data.reshape(-1) for number, param in enumerate(params)]

    rows = torch.full((ranks, layout.size), -1.0)
    filled, empty = layout.parts(rows, wholes, 0)
    for part, whole in zip(filled, layout.wholes(wholes, 0, ranks), strict=True):
        part.copy_(whole)
    for part in empty:
        part.zero_()
    expected = expected_rows(layout, wholes, ranks)
    assert torch.equal(rows, expected)

    # back, in runs of consecutive ranks, as they come
    gathered = [None if whole is None else torch.zeros_like(whole) for whole in wholes]
    first = 0
    while first < ranks:
        number = data.draw(st.integers(1, ranks - first))
        parts, _ = layout.parts(rows[first : first + number], gathered, first)
        for part, whole in zip(parts, layout.wholes(gathered, first, number), strict=True):
            whole.copy_(part)
        first += number
    for value, whole in zip(gathered, wholes, strict=True):
        assert (value is None and whole is None) or torch.equal(value, whole)
    assert len(filled) <= 2 * len(layout.pieces)  # whatever the number of ranks
