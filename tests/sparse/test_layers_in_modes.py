"""Layers that look up rows with a sparse gradient, in every tensor mode, against plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from helpers.compared import Case, compare_all, integers, numbers, prepare
from helpers.long import but
from helpers.modes import BATCH, MODES, TOKENS, own
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.context.parallel_context import ParallelContext
from colossus.layers.model_parallel import model_parallel_of

#: divides over the ranks of all modes, and over none
DIMS = (24, 7)
ROWS = 11
MODE_NAMES = but([mode for mode in MODES if mode not in ("1d_sequence", "2d_2x3", "3d")], MODES)


class Between(nn.Module):
    """A table in front of a block."""

    def __init__(self, embedding: nn.Module, norm: nn.Module, place: Any) -> None:
        super().__init__()
        self.embedding, self.norm, self.place = embedding, norm, place

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.place(self.embedding(ids)))


class Bags(nn.Module):
    def __init__(self, bag: nn.Module) -> None:
        super().__init__()
        self.bag = bag

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        return self.bag(ids, per_sample_weights=weights)


def cases() -> Iterator[Case]:
    for dim in DIMS:
        for shape in ((BATCH,), (BATCH, TOKENS), (BATCH, 2, TOKENS)):
            yield Case(
                f"embedding of {dim}, ids {shape}",
                partial(layers.Embedding, ROWS, dim, 2, sparse=True),
                partial(nn.Embedding, ROWS, dim, 2),
                (integers(ROWS, *shape),),
            )
        for mode in ("sum", "mean", "max"):
            for sparse in (True, False):
                padding = 3 if sparse else None
                yield Case(
                    f"bag of {dim}, {mode}, sparse {sparse}",
                    partial(layers.EmbeddingBag, ROWS, dim, mode=mode, sparse=sparse, padding_idx=padding),
                    partial(nn.EmbeddingBag, ROWS, dim, mode=mode, padding_idx=padding),
                    (integers(5, BATCH, 2),),
                )
        for sparse in (True, False):
            yield Case(
                f"bag of {dim}, weights, sparse {sparse}",
                lambda d=dim, s=sparse: Bags(layers.EmbeddingBag(ROWS, d, mode="sum", sparse=s)),
                lambda d=dim: Bags(nn.EmbeddingBag(ROWS, d, mode="sum")),
                (integers(ROWS, BATCH, 4), numbers(BATCH, 4)),
            )
    yield Case(
        "in front of a block",
        lambda: Between(layers.Embedding(ROWS, 24, sparse=True), layers.LayerNorm(24), layers.to_residual),
        lambda: Between(nn.Embedding(ROWS, 24), nn.LayerNorm(24), lambda x: x),
        (integers(ROWS, BATCH, TOKENS),),
    )


CASES = list(cases())


@pytest.mark.rest("3d")
@pytest.mark.parametrize("mode", MODE_NAMES)
def test_rows_are_looked_up_in_every_mode(mode: str) -> None:
    prepare(CASES, [torch.float64])

    def body(context: ParallelContext) -> list[str]:
        found = compare_all(context, CASES, [torch.float64])
        regions = model_parallel_of(context).regions
        layer: Any = colossus.build(
            lambda: layers.Embedding(ROWS, 24, sparse=True, return_layout=regions.residual), context
        )
        x = layer(own(context, integers(ROWS, BATCH, TOKENS)))
        if regions.residual != regions.whole and x.placement.activation != regions.residual:
            found.append(f"laid out as {x!r}")
        layers.to_whole(x).sum().backward()
        if not layer.weight.grad.is_sparse:
            found.append("a dense gradient")
        return found

    for rank, found in enumerate(MODES[mode].run(body)):
        assert not found, f"rank {rank}: " + "\n".join(found[:20])
