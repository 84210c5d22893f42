"""Gossip after each step: Stochastic Gradient Push (1811.10792; with overlap OSGP), and D-PSGD (1705.09056)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from colossus.data_parallel.gossip.gossip import Gossip
from colossus.data_parallel.options.gossip_options import DPSGDOptions, SGPOptions


class SGP(Gossip):
    """x <- P x after every step, w <- P w; gradients are of z = x / w, P column-stochastic.

    The update that the optimizer makes of z, weight decay included, is added to x as it is.

    With ``overlap`` k, what is sent after step t is taken in after step t + k, and travels while steps compute:
    x_i <- P_ii(t) x_i + sum_j P_ij(t - k) x_j(t - k), and so with w, which counts what is in flight.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(SGPOptions(**options))

    def after_step(self, step: int) -> None:
        if self.links is not None:
            self.push_sum.take_update()
            self.send(step)
            self.mix(step)


class DPSGD(Gossip):
    """Each replica averages with its neighbours and steps by itself: mixes with a doubly stochastic W.

    ``order="adapt_while_combine"``: x <- W x - lr g(x), the paper's algorithm 1. What is sent travels while gradients
    are computed; they are of x, and the optimizer steps from W x, which it also takes its weight decay of.
    ``order="adapt_then_combine"``: x <- W (x - lr g(x)).
    """

    options: DPSGDOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(DPSGDOptions(**options))

    @property
    def _combines_first(self) -> bool:
        return self.links is not None and self.options.order == "adapt_while_combine"

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if self._combines_first:
            self.send(step)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        scale: Tensor,
        before_update: Callable[[], None],
        found_inf: Tensor | None = None,
        clip_value: float | None = None,
    ) -> None:
        if self._combines_first:
            self.mix(self._completed)
        super().step(optimizer, scale, before_update, found_inf, clip_value)

    def after_step(self, step: int) -> None:
        self.push_sum.take_update()
        if self._combines_first:
            self.push_sum.debias()
        elif self.links is not None:
            self.send(step)
            self.mix(step)
