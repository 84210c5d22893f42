"""Dropout whose mask is a function of seed, step, microbatch, module and shard, not of the order of draws."""

from __future__ import annotations

import torch
from torch import Tensor

from colossus.layers.layer import Layer
from colossus.layers.sharded import ShardedActivation, unwrap, wrap
from colossus.layers.token_dim import tokens_of
from colossus.layout.activation import Activation
from colossus.refusal import refusal


class Dropout(Layer):
    """``torch.nn.Dropout``, exact under parallelism.

    The mask depends on the seed, the step, the microbatch, the module's name, how often it was called in this forward
    pass, and the rank's coordinates on the axes that split its input. Ranks that hold the same shard draw the same
    mask, ranks that hold different shards draw different ones, and recomputation draws the same again.
    """

    local_layouts = 1

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise refusal(f"Dropout: p = {p} is not in [0, 1)")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        local, activation, output_layout = unwrap(x, self.parallel)
        num_features = x.num_features if isinstance(x, ShardedActivation) else None
        y = self.apply_local(local, activation)
        return wrap(y, activation, output_layout, self.parallel, num_features, tokens_of(x))

    def apply_local(self, x: Tensor, activation: Activation) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        # contiguous, not in the strides of x: the same numbers would fall on other elements
        mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        mask.bernoulli_(1.0 - self.p, generator=self.generator(x.device, activation))
        return x * mask * (1.0 / (1.0 - self.p))

    def generator(self, device: torch.device, activation: Activation) -> torch.Generator:
        rng = self.context.rng
        coordinates = self.context.coordinates
        shard = [f"{axis}={coordinates[axis]}" for axis in activation.shard_axes]
        call = rng.next_call(self.full_name)
        return rng.at_position("dropout", device, self.full_name, call, *shard)

    def extra_repr(self) -> str:
        return f"p={self.p}"
