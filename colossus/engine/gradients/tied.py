"""Weights that stages of different ranks share: one logical parameter, with one gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from colossus.context.parallel_context import ParallelContext
from colossus.engine.gradients.buckets import Bucket


class TiedGradients:
    """Sums the gradients of shared parameters over the stages that have them, after the sum over data ranks.

    Args:
        shared: for each such parameter of this rank the pipeline ranks that hold it, the one that counts it in the
            norm first. In one order on all ranks.
    """

    def __init__(self, shared: Sequence[tuple[nn.Parameter, tuple[int, ...]]], context: ParallelContext) -> None:
        here = context.index("pipeline")
        together: dict[tuple[tuple[int, ...], torch.dtype], list[nn.Parameter]] = {}
        for param, ranks in shared:
            if param.requires_grad:
                together.setdefault((ranks, param.dtype), []).append(param)
        self._buckets = [
            Bucket(params, context.subgroup("pipeline", sorted(ranks))) for (ranks, _), params in together.items()
        ]
        #: ids of those that another rank counts in the norm
        self.counted_elsewhere = {id(param) for param, ranks in shared if ranks[0] != here}

    def sum(self) -> None:
        """All ranks that share parameters must call, once their own gradients are complete."""
        for bucket in self._buckets:
            for param in bucket.params:
                if param.grad is not None:
                    bucket.take(param)
            bucket.start()
            bucket.finish()


def shared_parameters(
    held: Mapping[str, nn.Parameter], ranks_of: Mapping[str, tuple[int, ...]]
) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
    """Of the parameters of this rank those that other ranks hold, too.

    Args:
        held: this rank's, by name.
        ranks_of: pipeline ranks of all parameters of the model, in its order.
    """
    return [(held[name], ranks) for name, ranks in ranks_of.items() if name in held and len(ranks) > 1]
