"""Stochastic Gradient Push (1811.10792), with overlap OSGP: push-sum gossip after each step."""

from __future__ import annotations

from typing import Any

from colossus.engine.strategies.gossip import Gossip
from colossus.engine.strategies.options.gossip import SGPOptions


class SGP(Gossip):
    """x <- P x after every step, w <- P w; gradients are of z = x / w, P column-stochastic.

    The update that the optimizer makes of z, weight decay included, is added to x as it is.

    With ``overlap`` k, what is sent after step t is taken in after step t + k, and travels while steps compute:
    x_i <- P_ii(t) x_i + sum_j P_ij(t - k) x_j(t - k), and so with w, which counts what is in flight.
    """

    options: SGPOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(SGPOptions(**options))

    def after_step(self, step: int) -> None:
        if self.links is not None:
            self.push_sum.take_update()
            self.send(step)
            self.mix(step)
