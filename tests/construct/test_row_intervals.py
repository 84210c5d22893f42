"""A rank that stores some row ranges of a parameter draws these alone, and what the whole parameter has there."""

from __future__ import annotations

import pytest
import torch
from helpers.ranks import grid
from torch import nn

from colossus import layers
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.layout.parameter import StoredSpec, attach, spec_of
from colossus.layout.split_parameter import as_shards

ROWS, DIM = 11, 3


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ours = layers.Embedding(ROWS, DIM, padding_idx=4, sparse=True)
        self.plain = nn.Embedding(ROWS, DIM, padding_idx=9)


@pytest.mark.parametrize("intervals", [((2, 5), (8, 11)), ((0, 1), (4, 4), (9, 10)), ()])
def test_row_ranges_are_drawn_as_the_whole_is(intervals: tuple[tuple[int, int], ...]) -> None:
    context = ParallelContext(grid(data=2), 1, connect=False)

    def place(model: nn.Module) -> None:
        for param in model.parameters():
            spec = StoredSpec(spec_of(param), ("data",), context.grid.sizes)
            spec.place(intervals)
            attach(param, spec)

    whole, part = build(Tables, context), build(Tables, context, prepare=place)
    for name in ("ours.weight", "plain.weight"):
        wanted = torch.cat([whole.get_parameter(name)[:0], *(whole.get_parameter(name)[a:b] for a, b in intervals)])
        with as_shards():
            assert torch.equal(part.get_parameter(name), wanted), name
    assert spec_of(part.ours.weight).boxes(
        spec_of(part.ours.weight).shards[0], context.grid.sizes, context.coordinates
    ) == tuple((interval, (0, DIM)) for interval in intervals)
