"""Dropout whose mask is a function of seed, step, microbatch, module and shard, not of the order of draws."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colossus.comm.autograd import is_hooked
from colossus.error_place import located_error
from colossus.layers.layer import Layer
from colossus.layout.activation import Activation
from colossus.sharded_tensor.tensor import placement_of, plain, wrap


class Dropout(Layer):
    """``torch.nn.Dropout``, exact under parallelism.

    The mask depends on the seed, the step, the microbatch, the module's name, how often it was called in this forward
    pass, and the rank's coordinates on the axes that split its input. Ranks that hold the same shard draw the same
    mask, ranks that hold different shards draw different ones, and recomputation draws the same again.
    """

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise located_error(f"Dropout: p = {p} is not in [0, 1)")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        placement = placement_of(x)
        activation = placement.activation if placement is not None else self.parallel.regions.whole
        return wrap(self._drop(plain(x), activation), placement)

    def _drop(self, x: Tensor, activation: Activation) -> Tensor:
        """A plain local tensor laid out as ``activation``, some of its elements zero."""
        generator, keep = self.generator(x.device, activation), 1.0 - self.p
        if x.requires_grad and not torch.compiler.is_compiling() and torch.is_grad_enabled() and is_hooked():
            out: Tensor = _WithoutSavedMask.apply(x, generator, keep)
            return out
        return x * _draw(x, generator, keep) * (1.0 / keep)

    def generator(self, device: torch.device, activation: Activation) -> torch.Generator:
        rng = self.context.rng
        coordinates = self.context.coordinates
        shard = [f"{axis}={coordinates[axis]}" for axis in activation.shard_axes]
        call = rng.next_call(self.full_name)
        return rng.at_position("dropout", device, self.full_name, call, *shard)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def _draw(x: Tensor, generator: torch.Generator, keep: float) -> Tensor:
    # contiguous, not in the strides of x: the same numbers would fall on other elements
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    return mask.bernoulli_(keep, generator=generator)


class _WithoutSavedMask(torch.autograd.Function):
    """Dropout for where activations are recomputed: its mask follows from its seed, and is drawn again in backward.

    A mask that is saved behind a collective would make the recomputation repeat that for the mask alone.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, generator: torch.Generator, keep: float) -> Tensor:
        ctx.generator, ctx.keep = generator, keep
        return x * _draw(x, generator, keep) * (1.0 / keep)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mask = _draw(grads[0], ctx.generator.manual_seed(ctx.generator.initial_seed()), ctx.keep)
        return grads[0] * (1.0 / ctx.keep) * mask, None, None
