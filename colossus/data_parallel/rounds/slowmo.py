"""SlowMo (1910.00643): momentum of whole rounds, over local SGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm.objects import all_gather_object
from colossus.data_parallel.gossip.optimizer_state import entries_of
from colossus.data_parallel.options.averaging import SlowMoOptions
from colossus.data_parallel.parameter_vector import ParameterVector
from colossus.data_parallel.rounds.averaging import Averaging, sum_of_shares
from colossus.data_parallel.rounds.fragments import Fragment, chunks_of
from colossus.data_parallel.rounds.optimizer_start import StateAtStart
from colossus.data_parallel.rounds.outer_step import outer_step
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.reduction import ModelParts


class SlowMo(Averaging):
    """u <- beta u + (x_0 - x) / gamma, x_0 <- x_0 - alpha gamma u, with x the replicas' average at the end of a round.

    gamma is the optimizer's learning rate, of each parameter group the mean over the round. ``buffers`` says what
    becomes of the optimizer's state at the end of a round (section 2 of the paper): each replica keeps its own, all
    begin anew, or all take the average.
    """

    options: SlowMoOptions
    keeps_anchor = True

    def __init__(self, **options: Any) -> None:
        super().__init__(SlowMoOptions(**options))

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        #: of each parameter the sum of the learning rates of the round's steps
        self._lr_sums: dict[nn.Parameter, float] = {}
        self._num_steps = 0

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._state_at_start = optimizer, StateAtStart(optimizer)

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        self._num_steps += 1
        for group in optimizer.param_groups:
            lr = float(group["lr"])
            for param in group["params"]:
                self._lr_sums[param] = self._lr_sums.get(param, 0.0) + lr

    def end_round(self, fragment: Fragment, average: Tensor, weight: Tensor) -> None:
        options = self.options
        outer_step(
            fragment,
            average,
            lr=options.slow_lr,
            momentum=options.slow_momentum,
            nesterov=False,
            inner_lr=[self._lr_sums.get(param, 0.0) / max(1, self._num_steps) for param in fragment.params],
        )
        self._lr_sums.clear()
        self._num_steps = 0
        if options.buffers == "reset":
            self._state_at_start.restore(fragment.params)
        elif options.buffers == "average":
            self._average_buffers(fragment, weight)

    def _average_buffers(self, fragment: Fragment, weight: Tensor) -> None:
        """All replicas' state of the parameters' shape. One that has none of a parameter, since it has not updated it
        so far, adds nothing and takes nothing."""
        own = {
            (index, name): value
            for index, of_param in enumerate(entries_of(self._optimizer, fragment.params))
            for name, value in of_param.items()
        }
        known: dict[tuple[int, str], torch.dtype] = {}
        for of_rank in all_gather_object({key: value.dtype for key, value in own.items()}, self._data_group):
            known.update(of_rank)
        keys = sorted(known)
        values = [
            own[key] if key in own else torch.zeros_like(fragment.params[key[0]].detach(), dtype=known[key])
            for key in keys
        ]
        vector = ParameterVector(values, wide=True)
        buffer = vector.empty()
        vector.pack(buffer)
        sum_of_shares(chunks_of(vector.parts(buffer)), weight, self._data_group)
        vector.unpack(buffer)

    # -- state ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_steps": self._num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._num_steps = state.get("num_steps", 0)

    def parameter_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        found = super().parameter_state()
        for param, total in self._lr_sums.items():
            found.setdefault(param, {})["lr_sum"] = total
        return found

    def load_parameter_state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        super().load_parameter_state(state)
        self._lr_sums = {param: held["lr_sum"] for param, held in state.items() if "lr_sum" in held}
