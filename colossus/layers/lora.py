"""LoRA (2106.09685): a frozen linear with a trained product of two thin matrices beside it."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

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
        outputs: of a linear with several outputs, those that are adapted, each by two matrices of its own, as peft has
            them; by default all, with one ``first``.

    Shape:
        that of ``base``. ``first`` is [rank, in_features], ``second`` [out_features, rank], each output its own.

    Raises:
        ValueError: ``base`` is no `Linear`, or the rank does not divide where it is split.
    """

    def __init__(
        self, base: Linear, rank: int, alpha: float | None = None, outputs: Sequence[str] | None = None
    ) -> None:
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
        self.first: nn.Module
        self.second: nn.Module
        self._adapted = None if outputs is None else tuple(outputs)
        if outputs is not None:
            if not base.is_fused or set(outputs) - base.outputs.keys():
                raise located_error(f"LoRALinear: outputs = {tuple(outputs)}; the linear has {tuple(base.outputs)}")
            self.first = nn.ModuleDict({name: nn.Linear(base.in_features, self.rank, bias=False) for name in outputs})
            self.second = nn.ModuleDict({name: self._make_second(base.outputs[name]) for name in outputs})
            return
        if base.split == "row":
            self.first = Linear(base.in_features, self.rank, bias=False, split="row")
        else:
            self.first = nn.Linear(base.in_features, self.rank, bias=False)
        self.second = self._make_second(base.outputs if base.is_fused else base.out_features)

    def _make_second(self, outputs: Any) -> nn.Module:
        if self.base.split == "column" or isinstance(outputs, Mapping):
            return Linear(self.rank, outputs, bias=False, split=self.base.split, init=Constant(0.0))
        second = nn.Linear(self.rank, outputs, bias=False)
        nn.init.zeros_(second.weight)
        return second

    def forward(self, input: Tensor) -> Any:
        y = self.base(input)
        if self.parallel.adapters_off:
            return y
        if self._adapted is not None:
            firsts, seconds = cast(nn.ModuleDict, self.first), cast(nn.ModuleDict, self.second)
            whole, sums = to_whole(input), dict(zip(self.base.outputs, y, strict=True))
            for name in self._adapted:
                sums[name] = self._sum(sums[name], self._product(firsts[name], seconds[name], whole))
            return tuple(sums.values())
        added = self._product(self.first, self.second, input if isinstance(self.first, Linear) else to_whole(input))
        if self.is_fused:
            return tuple(self._sum(one, other) for one, other in zip(y, added, strict=True))
        return self._sum(y, added)

    def _product(self, first: nn.Module, second: nn.Module, input: Tensor) -> Any:
        thin = to_whole(first(input))
        return second(thin if self.scale == 1.0 else thin * self.scale)

    def _sum(self, y: Tensor, added: Tensor) -> Tensor:
        """Return the sum in the layout of y."""
        placement = placement_of(y)
        layout = self.parallel.regions.whole if placement is None else placement.activation
        return y + moved(added, layout, self.parallel)

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale}"
