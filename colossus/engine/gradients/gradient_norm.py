"""The global gradient norm, each element of each logical parameter counted once."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import torch
from torch import Tensor, nn

from colossus.context.parallel_context import ParallelContext
from colossus.layout.layout import Layout
from colossus.layout.parameter import spec_of


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
        layouts = [spec_of(param).layout for param in self.params]
        shard = {axis for layout in layouts for axis in layout.shard_axes if sizes[axis] > 1}
        if sizes["pipeline"] > 1:  # stages hold other parameters, but all must sum over the same axes
            shard |= {axis for axis in context.grid.axes(("pipeline", "tensor")) if sizes[axis] > 1}
        #: axes that shard some parameter
        self.axes = tuple(axis for axis in context.grid.names if axis in shard)
        self.counted = [
            param
            for param, layout in zip(self.params, layouts, strict=True)
            if id(param) not in counted_elsewhere and _is_first(layout, sizes, at, self.axes)
        ]

    def local_square(self, device: torch.device) -> Tensor:
        """Sum of squares of the counted gradients, float64 scalar."""
        grads = [param.grad for param in self.counted if param.grad is not None]
        if not grads:
            return torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack(torch._foreach_norm(grads)).double().square().sum()


def _is_first(layout: Layout, sizes: Mapping[str, int], at: Mapping[str, int], axes: tuple[str, ...]) -> bool:
    """Whether this rank is the first of those that hold the same shard; stages hold different parameters."""
    return layout.owns(sizes, at, tuple(axis for axis in axes if axis != "pipeline"))
