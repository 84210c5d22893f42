"""Stochastic Gradient Push (1811.10792), with overlap OSGP: push-sum gossip after each step."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from colossus.data_parallel.gossip.arrivals import require_alive
from colossus.data_parallel.gossip.eager import Eager
from colossus.data_parallel.gossip.gossip import Gossip
from colossus.data_parallel.options.gossip import TOLD_WEIGHT, SGPOptions
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.reduction import ModelParts

log = logging.getLogger("colossus.engine")


class SGP(Gossip):
    """x <- P x after every step, w <- P w; gradients are of z = x / w, P column-stochastic.

    The update that the optimizer makes of z, weight decay included, is added to x as it is.

    With ``overlap`` k, what is sent after step t is taken in after step t + k, and travels while steps compute:
    x_i <- P_ii(t) x_i + sum_j P_ij(t - k) x_j(t - k), and so with w, which counts what is in flight.

    With ``eager``, messages are taken in as they come; see `Eager`.
    """

    options: SGPOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(SGPOptions(**options))
        self.stops_by_store = self.options.eager
        self._eager: Eager | None = None

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        if self.options.eager and self.links is not None:
            assert self.stop_agreement is not None
            self.stop_agreement.while_waiting = partial(require_alive, self.links)
            self._eager = Eager(self)
        least = self.options.least_weight(self.graph)
        if least is not None and least.weight < TOLD_WEIGHT and parts.context.rank == 0:
            log.warning("sgp: %s; let the learning rate warm up for longer than that", least.in_words)

    def after_step(self, step: int) -> None:
        if self.links is None:
            return
        self._completed = step + 1
        self.push_sum.take_update()
        if self._eager is not None:
            self._eager.exchange(step)
            return
        self.send(step)
        self.mix(step)

    def come_together(self) -> None:
        super().come_together()
        if self._eager is not None:
            self._eager.drain(self._completed - 1)

    def close(self) -> None:
        if self._eager is not None:
            self.part()
        super().close()

    def report(self) -> dict[str, float]:
        report = super().report()
        if self._eager is not None:
            report |= self._eager.report()
        return report
