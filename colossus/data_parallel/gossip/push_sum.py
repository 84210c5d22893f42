"""x and w of push-sum (1811.10792): what a replica mixes, beside the z = x / w that its model computes with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colossus.data_parallel.parameter_vector import ParameterVector

_EPSILON = 2.0**-52


@dataclass(frozen=True)
class Addend:
    """What a replica takes in of another.

    Attributes:
        share: what the graph gives of it.
        weight: push-sum weight of the other.
        data: x of the other, uint8 on the host.
    """

    share: float
    weight: float
    data: Tensor


class PushSum:
    """Of a replica. Where w is 1, x is the parameters themselves, and is mixed where it lies; else it is kept beside
    them. What an update adds to z is added to x as it is.

    Args:
        params: the trainable parameters as they are stored, detached.

    Attributes:
        weight: w.
        vector: how x is packed.
        x: where w is not 1, bytes of ``vector`` on the device; else None.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params, self.vector = list(params), ParameterVector(params)
        self.weight = 1.0
        self.x: Tensor | None = None

    @torch.no_grad()
    def take_update(self) -> None:
        """Add to x what an update has added to z since `mix`."""
        if self.x is None:
            return
        for x, z in zip(self.vector.views(self.x), self.params, strict=True):
            x.add_(z - x / self.weight)  # as `debias` divides: 0 where nothing was added to z

    @torch.no_grad()
    def write(self, data: Tensor) -> None:
        """Copy x to ``data``, uint8 [``vector.nbytes``] on the host."""
        if self.x is None:
            self.vector.pack(data)
        else:
            data.copy_(self.x)

    @torch.no_grad()
    def mix(self, kept: float, addends: Sequence[Addend]) -> None:
        """x <- kept x + the others' shares, w likewise; then z = x / w."""
        x = self.params if self.x is None else self.vector.parts(self.x)
        if len(addends) == 1 and kept + addends[0].share == 1.0:  # in one pass
            torch._foreach_lerp_(x, self._operands(addends[0]), addends[0].share)
        else:
            torch._foreach_mul_(x, kept)
            for addend in addends:
                torch._foreach_add_(x, self._operands(addend), alpha=addend.share)
        weight = kept * self.weight + sum(addend.share * addend.weight for addend in addends)
        # 1 where it is 1 but for rounding
        self.weight = 1.0 if abs(weight - 1.0) <= 2 * (1 + len(addends)) * _EPSILON else weight
        self.debias()

    @torch.no_grad()
    def rescale(self, scale: float) -> None:
        """Multiply x and w; z stays."""
        if self.x is None:
            self.x = self.vector.empty()
            self.vector.pack(self.x)
        torch._foreach_mul_(self.vector.parts(self.x), scale)
        self.weight *= scale

    @torch.no_grad()
    def debias(self) -> None:
        """z = x / w."""
        if self.x is None:
            if self.weight == 1.0:
                return
            self.x = self.vector.empty()
            self.vector.pack(self.x)
        if self.weight == 1.0:
            self.vector.unpack(self.x)
            self.x = None
            return
        for x, z in zip(self.vector.views(self.x), self.params, strict=True):
            torch.div(x, self.weight, out=z)

    @torch.no_grad()
    def total(self, addends: Sequence[Addend]) -> tuple[list[Tensor], float]:
        """x by parameter and w, with what is added to them, which changes nothing. Of no use after the next `mix`."""
        if self.x is None and not addends:
            return self.params, self.weight
        total = self.vector.empty()
        if self.x is None:
            self.vector.pack(total)
        else:
            total.copy_(self.x)
        for addend in addends:
            torch._foreach_add_(self.vector.parts(total), self._parts(addend), alpha=addend.share)
        return self.vector.views(total), self.weight + sum(addend.share * addend.weight for addend in addends)

    @torch.no_grad()
    def restore(self, weight: float, x: Sequence[Tensor] | None) -> None:
        """Take back w and, where it is not 1, x by parameter; z is what the parameters are."""
        self.weight, self.x = weight, None
        if x is not None:
            self.x = self.vector.empty()
            for view, saved in zip(self.vector.views(self.x), x, strict=True):
                view.copy_(saved)

    def _operands(self, addend: Addend) -> list[Tensor]:
        """An addend as x lies: by parameter where w is 1, else in parts."""
        return (
            self.vector.views(self.vector.on_device(addend.data[: self.vector.nbytes]))
            if self.x is None
            else self._parts(addend)
        )

    def _parts(self, addend: Addend) -> list[Tensor]:
        return self.vector.parts(self.vector.on_device(addend.data[: self.vector.nbytes]))
