"""LoRA (2106.09685): a frozen linear with a trained product of two thin matrices beside it."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, nn

from colossus.construct.initial_values import Constant
from colossus.error_place import located_error
from colossus.layers.layer import Layer
from colossus.layers.linear import Linear
from colossus.sharded_tensor.placement import placement_of
from colossus.sharded_tensor.regions import moved, to_whole


class LoRALinear(Layer):
    """A linear with an adapter: base(x) + alpha / rank * second(first(x)), with ``base`` frozen.

    It takes and returns what ``base`` does, one tensor or several, and does not gather features between a pair: around
    a column linear ``second`` is split by output like ``base``, around a row linear ``first`` is split by input. In 1D
    the ranks exchange tokens x rank numbers for it. ``second`` starts as zeros, so that training starts from the base.

    Args:
        base: a linear of the adapted model; its parameters get no gradient from now on.
        rank: inner size of the product; between a pair it must divide as the features of the mode do.
        alpha: by default ``rank``: the product is added unscaled.

    Shape:
        that of ``base``. ``first`` is [rank, in_features], ``second`` [out_features, rank], each output its own.

    Raises:
        ValueError: ``base`` is no `Linear`, or the rank does not divide where it is split.
    """

    def __init__(self, base: Linear, rank: int, alpha: float | None = None) -> None:
        super().__init__()
        if not isinstance(base, Linear):
            raise located_error(
                f"LoRALinear around a {type(base).__module__}.{type(base).__qualname__}: it takes a "
                f"colossus.layers.Linear; replace it by one, or adapt it with plain torch outside a pair"
            )
        self.base, self.rank = base.requires_grad_(False), operator.index(rank)
        if self.rank < 1:
            raise located_error(f"LoRALinear: rank = {rank}; it is the inner size of a product, so at least 1")
        self.scale = 1.0 if alpha is None else alpha / self.rank
        self.is_fused = base.is_fused
        outputs: Any = base.outputs if base.is_fused else base.out_features
        self.first: nn.Module
        self.second: nn.Module
        if base.split == "row":
            self.first = Linear(base.in_features, self.rank, bias=False, split="row")
        else:
            self.first = nn.Linear(base.in_features, self.rank, bias=False)
        if base.split == "column" or base.is_fused:
            self.second = Linear(self.rank, outputs, bias=False, split=base.split, init=Constant(0.0))
        else:
            self.second = nn.Linear(self.rank, outputs, bias=False)
            nn.init.zeros_(self.second.weight)

    def forward(self, input: Tensor) -> Any:
        y = self.base(input)
        if self.parallel.adapters_off:
            return y
        thin = to_whole(self.first(input if isinstance(self.first, Linear) else to_whole(input)))
        added = self.second(thin if self.scale == 1.0 else thin * self.scale)
        if self.is_fused:
            return tuple(self._sum(one, other) for one, other in zip(y, added, strict=True))
        return self._sum(y, added)

    def _sum(self, y: Tensor, added: Tensor) -> Tensor:
        """Return the sum in the layout of y."""
        placement = placement_of(y)
        layout = self.parallel.regions.whole if placement is None else placement.activation
        return y + moved(added, layout, self.parallel)

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale}"
