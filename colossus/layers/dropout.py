"""Dropout whose mask is a function of seed, step, sample, module and element, not of the order of draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from colossus.comm.autograd import is_hooked
from colossus.error_place import located_error
from colossus.layers.dropout_mask import ElementNumbers, keep_mask
from colossus.layers.layer import Layer
from colossus.sharded_tensor.placement import Placement, placement_of
from colossus.sharded_tensor.tensor import plain, wrap


class Dropout(Layer):
    """``torch.nn.Dropout``, the same under every plan.

    An element is dropped depending on the seed, the step, its sample in the global batch, the module's name, the number
    of its call in this forward pass, and the element's place in the sample (token and feature, say). So ranks that have
    the same element drop it alike, under any plan, and recomputation draws the same again.

    Shape:
        any, dim 0 the samples (see `ElementNumbers.of`).
    """

    is_reproducible = True

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise located_error(f"Dropout: p = {p} is not in [0, 1)")
        self.p = p

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0.0 or not input.numel():
            return input
        placement = placement_of(input)
        return wrap(self.drop(plain(input), placement or self.parallel.whole_placement), placement)

    def drop(self, x: Tensor, placement: Placement) -> Tensor:
        """Return a plain local tensor, split by ``placement``, with some elements zero and the others over 1 - p."""
        rng = self.context.rng
        key = rng.key("dropout", rng.step, self.full_name, rng.next_call(self.full_name))
        numbers = ElementNumbers.of(x, placement, self.parallel)

        shape, device, p, scale = x.shape, x.device, self.p, 1.0 / (1.0 - self.p)

        def draw() -> Tensor:
            return keep_mask(key, numbers, p, device).reshape(shape)

        if x.requires_grad and not torch.compiler.is_compiling() and torch.is_grad_enabled() and is_hooked():
            out: Tensor = _WithoutSavedMask.apply(x, draw, scale)
            return out
        return x * draw() * scale

    def extra_repr(self) -> str:
        return f"p={self.p}"


class _WithoutSavedMask(torch.autograd.Function):
    """Dropout for recomputed activations: its mask follows from its key, and is drawn again in backward.

    A saved mask behind a collective would make the recomputation repeat the collective only for the mask.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, draw: Callable[[], Tensor], scale: float) -> Tensor:
        ctx.draw, ctx.scale = draw, scale
        return x * draw() * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.draw() * ctx.scale, None, None
