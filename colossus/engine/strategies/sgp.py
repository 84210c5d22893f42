"""Stochastic Gradient Push (1811.10792), with overlap OSGP: push-sum gossip after each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colossus.engine.parameter_store import ParameterStore
from colossus.engine.parts import ModelParts
from colossus.engine.strategies.gossip import Gossip, InFlight
from colossus.engine.strategies.options.gossip import SGPOptions


class SGP(Gossip):
    """x <- P x after every step, w <- P w; gradients are of z = x / w, P column-stochastic.

    The parameters of the model are z between steps. The update that the optimizer makes of z, weight decay included,
    is added to x as it is.

    With ``overlap`` k, what is sent after step t is taken in after step t + k, and travels while steps compute.
    """

    options: SGPOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(SGPOptions(**options))

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        #: x where w is not 1: what the parameters are times w, without its rounding
        self._x: Tensor | None = None

    def share(self) -> tuple[list[Tensor], float]:
        buffer, weight = self._numerator(), self.weight
        for message in self.in_flight:
            data = self.receive(message).data
            assert data is not None
            for part, added in zip(self.vector.parts(buffer), self.vector.parts(data), strict=True):
                part.add_(added)
            weight += message.weight
        return self.vector.views(buffer), weight

    @torch.no_grad()
    def _numerator(self) -> Tensor:
        """x as it is after the optimizer's update of z; a copy."""
        buffer = self.vector.empty()
        self.vector.pack(buffer)  # z, with the update
        if self._x is not None:
            for part, x in zip(self.vector.parts(buffer), self.vector.parts(self._x), strict=True):
                part.add_(x - x / self.weight)
        return buffer

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if self.links is None:
            return
        buffer, me = self._numerator(), self._data_group.index
        graph, k = self.send(step, buffer), self.options.overlap
        kept = graph.keeps(me)
        for part in self.vector.parts(buffer):
            part.mul_(kept)
        self.weight *= kept
        self.in_flight += [InFlight(source, step, step + k) for source in graph.sources(me)]
        self.take_in(buffer, [message for message in self.in_flight if message.due <= step])
        if self.weight == 1.0:
            self._x = None
            self.vector.unpack(buffer)
            return
        self._x = buffer
        z = self.vector.empty()
        for part, x in zip(self.vector.parts(z), self.vector.parts(buffer), strict=True):
            torch.div(x, self.weight, out=part)
        self.vector.unpack(z)
