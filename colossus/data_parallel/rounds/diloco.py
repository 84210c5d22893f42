"""DiLoCo (2311.08105): an outer optimizer steps by what a round of the replicas' own steps has changed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from colossus.data_parallel.options.averaging import DiLoCoOptions
from colossus.data_parallel.rounds.averaging import Averaging
from colossus.data_parallel.rounds.fragments import Fragment
from colossus.data_parallel.rounds.outer_step import outer_step
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.reduction import ModelParts


class DiLoCo(Averaging):
    """The outer gradient is what the parameters were when a round began minus the replicas' average at its end.

    With ``fragments`` the model's blocks are averaged in turn (2501.18512, without its quantisation and overlap): each
    fragment once in a round, after steps of its own, so that the bytes of a round are spread over it.
    """

    options: DiLoCoOptions
    keeps_anchor = True

    def __init__(self, **options: Any) -> None:
        super().__init__(DiLoCoOptions(**options))

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        self.num_fragments = self.options.fragments
        super().setup(store, parts)

    def end_round(self, fragment: Fragment, average: Tensor, weight: Tensor) -> None:
        options = self.options
        outer_step(
            fragment,
            average,
            lr=options.outer_lr,
            momentum=options.outer_momentum,
            nesterov=options.nesterov,
        )
