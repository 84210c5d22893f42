"""The tensor modes and shapes that layers are tested under."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from helpers.ranks import grid_of, run_ranks
from torch import Tensor

from colossus.context.parallel_context import ParallelContext
from colossus.layers.model_parallel import model_parallel_of
from colossus.registry import TENSOR_MODES

BATCH, TOKENS = 12, 6


@dataclass(frozen=True)
class Mode:
    """A tensor mode with sizes, beside data parallelism."""

    name: str
    shape: tuple[int, ...]
    data: int = 1
    sequence_sharded: bool = False

    @property
    def world(self) -> int:
        return math.prod(self.shape) * self.data

    def run(self, body: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        axes = TENSOR_MODES.get(self.name).axes
        plan = grid_of(data=self.data, tensor=dict(zip(axes, self.shape, strict=True)))
        return run_ranks(
            self.world, body, *args, plan=plan, mode=self.name, sequence_sharded=self.sequence_sharded, **options
        )


MODES = {
    "1d": Mode("1d", (3,)),
    "1d_sequence": Mode("1d", (2,), sequence_sharded=True),
    "2d": Mode("2d", (2, 2)),
    "2d_2x3": Mode("2d", (2, 3)),
    "2d_3x2": Mode("2d", (3, 2)),
    "2.5d_depth1": Mode("2.5d", (1, 2, 2)),
    "2.5d_depth2": Mode("2.5d", (2, 2, 2)),
    "3d": Mode("3d", (2, 2, 2)),
    "3d_2x1x2": Mode("3d", (2, 1, 2)),
    "3d_1x2x3": Mode("3d", (1, 2, 3)),
    "data2_2d": Mode("2d", (2, 2), data=2),
}


def own(context: ParallelContext, x: Tensor) -> Tensor:
    """What the whole layout gives this rank of a global batch, or of a mask, which may have none."""
    if x.shape[0] != BATCH:
        return x
    axes = model_parallel_of(context).regions.whole.batch
    return x.chunk(context.size(axes) if axes else 1)[context.index(axes)]


def with_options(context: ParallelContext, **options: Any) -> ParallelContext:
    """The same ranks and groups for layers with other options, without another fork."""
    other = object.__new__(ParallelContext)
    vars(other).update(vars(context))
    other.options = replace(context.options, **options)
    return other
