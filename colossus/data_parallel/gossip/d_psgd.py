"""Decentralized parallel SGD (D-PSGD, 1705.09056): each replica averages with its neighbours and steps by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from colossus.data_parallel.gossip.gossip import Gossip
from colossus.data_parallel.options.gossip import DPSGDOptions


class DPSGD(Gossip):
    """Mixes with a doubly stochastic W.

    ``order="adapt_while_combine"``: x <- W x - lr g(x), the paper's algorithm 1. What is sent travels while gradients
    are computed; they are of x, and the optimizer steps from W x, which it also takes its weight decay of.
    ``order="adapt_then_combine"``: x <- W (x - lr g(x)).

    What a step that failed has sent is not sent again when the step is made again.
    """

    options: DPSGDOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(DPSGDOptions(**options))
        #: of adapt_while_combine: the last step of which x was sent
        self._sent = -1

    @property
    def _combines_first(self) -> bool:
        return self.links is not None and self.options.order == "adapt_while_combine"

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if self._combines_first and step != self._sent:
            self.send(step)
            self._sent = step

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        scale: Tensor,
        before_update: Callable[[], None],
        found_inf: Tensor | None = None,
        clip_value: float | None = None,
    ) -> None:
        if self._combines_first:
            self.mix(self._sent)
        super().step(optimizer, scale, before_update, found_inf, clip_value)

    def after_step(self, step: int) -> None:
        self.push_sum.take_update()
        if self._combines_first:
            self.push_sum.debias()
        elif self.links is not None:
            self.send(step)
            self.mix(step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._sent = -1
