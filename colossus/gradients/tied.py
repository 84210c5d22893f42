"""Tied weights: parameters that stages of different ranks share, with one gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from colossus.context.parallel_context import ParallelContext
from colossus.gradients.bucket_sum import FlatSum
from colossus.gradients.buckets import Bucket, LocalSum
from colossus.tensor_parallel.dtypes import gradient_dtype


class TiedGradients:
    """Sums the gradients of tied parameters over the pipeline ranks that hold them, after the sum over data ranks.

    Args:
        tied: the tied parameters of this rank, each with the pipeline ranks that hold it; in the same order on all.
    """

    def __init__(self, tied: Sequence[tuple[nn.Parameter, tuple[int, ...]]], context: ParallelContext) -> None:
        by_ranks: dict[tuple[tuple[int, ...], torch.dtype], list[nn.Parameter]] = {}
        for param, ranks in tied:
            if param.requires_grad:
                by_ranks.setdefault((ranks, gradient_dtype(param)), []).append(param)
        self._buckets = [
            Bucket(params, FlatSum(context.subgroup("pipeline", sorted(ranks))), context.precision.reduce_dtype(dtype))
            for (ranks, dtype), params in by_ranks.items()
        ]

    def sum(self) -> None:
        """Collective over the ranks that share parameters, once their own gradients are complete."""
        for bucket in self._buckets:
            for param in bucket.params:
                if param.grad is not None:
                    bucket.take(param)
            bucket.start()
            bucket.finish()

    def local_sums(self) -> list[LocalSum]:
        """Of what this rank put into the last sum: of gradients that are summed over data ranks already."""
        return [one for bucket in self._buckets for one in bucket.local_sums()]


def tied_parameters(
    held: Mapping[str, nn.Parameter], ranks_of: Mapping[str, tuple[int, ...]]
) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
    """The parameters of this rank that other pipeline ranks hold, too, each with all ranks that do.

    Args:
        held: this rank's, by name.
        ranks_of: pipeline ranks of all parameters of the model, in its order.
    """
    return [(held[name], ranks) for name, ranks in ranks_of.items() if name in held and len(ranks) > 1]
