"""The global gradient norm, each element of each logical parameter counted once."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import torch
from torch import Tensor, nn

from colossus.context.parallel_context import ParallelContext
from colossus.layout.parameter import ParameterSpec, spec_of


class GradientNorm:
    """The sum of squares of the gradients that this rank counts.

    A shard that several ranks hold is counted by the first of them, so that the plain sum over ``axes`` is exact. All
    replicas of a shard have the same gradient by then, so the sum goes over the axes that shard parameters, and no
    further.

    Args:
        counted_elsewhere: ids of tied parameters that another pipeline rank counts.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], context: ParallelContext, counted_elsewhere: Container[int] = ()
    ) -> None:
        self.params = [param for param in params if param.requires_grad]
        sizes, at = context.grid.sizes, context.coordinates
        specs = [spec_of(param) for param in self.params]
        shard = {axis for spec in specs for axis in spec.layout.shard_axes if sizes[axis] > 1}
        if sizes["pipeline"] > 1:  # stages hold other parameters, but all must sum over the same axes
            shard |= {axis for axis in context.grid.axes(("pipeline", "tensor")) if sizes[axis] > 1}
        #: axes that shard some parameter
        self.axes = tuple(axis for axis in context.grid.names if axis in shard)
        #: parameters of which this rank counts the gradient: some rows, or all of them (None)
        self.counted = [
            (param, rows)
            for param, spec in zip(self.params, specs, strict=True)
            if id(param) not in counted_elsewhere
            for rows in _counted_rows(spec, sizes, at, self.axes)
        ]

    def local_square(self, device: torch.device) -> Tensor:
        """Sum of squares of the counted gradients, float64 scalar."""
        grads = [
            param.grad if rows is None else param.grad[slice(*rows)]
            for param, rows in self.counted
            if param.grad is not None
        ]
        if not grads:
            return torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack(torch._foreach_norm(grads)).double().square().sum()


def _counted_rows(
    spec: ParameterSpec, sizes: Mapping[str, int], at: Mapping[str, int], axes: tuple[str, ...]
) -> list[tuple[int, int] | None]:
    """Rows of the shards that this rank is the first to hold, or None for all; stages hold different parameters."""
    axes = tuple(axis for axis in axes if axis != "pipeline")
    owned = [shard.rows for shard in spec.shards if shard.layout.owns(sizes, at, axes)]
    return [None] if len(owned) == len(spec.shards) else list(owned)
