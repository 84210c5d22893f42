"""Strategies that make a step of a whole round, the replicas' average against what they began with: SlowMo, DiLoCo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colossus.data_parallel.options.strategy_options import DiLoCoOptions, SlowMoOptions
from colossus.data_parallel.rounds.averaging import Averaging
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.reduction import ModelParts


class OuterStep(Averaging):
    """Base: what a round has changed is the gradient of an outer SGD, of which all replicas make the same step."""

    keeps_anchor = True

    @torch.no_grad()
    def outer_step(
        self, average: Tensor, *, lr: float, momentum: float, nesterov: bool, inner_lr: Sequence[float] | None = None
    ) -> None:
        """SGD on the anchor, with the gradient ``(anchor - average) / inner_lr`` and the rate ``lr * inner_lr``.

        With an inner rate that is slow momentum (1910.00643, algorithm 1), without one the outer step of DiLoCo
        (2311.08105).

        Args:
            average: bytes of the vector; overwritten with what the anchor is then.
            inner_lr: of each parameter, the mean over the round. Where it is 0 nothing has moved.
        """
        anchor, gradient = self.anchor, self.vector.views(average)
        assert anchor is not None
        if not anchor:
            return
        if self.momentum is None and momentum:
            self.momentum = [torch.zeros_like(value) for value in anchor]
        torch._foreach_neg_(gradient)
        torch._foreach_add_(gradient, anchor)
        if inner_lr is not None:
            torch._foreach_mul_(gradient, [1 / rate if rate else 0.0 for rate in inner_lr])
        if (buffer := self.momentum) is not None:
            torch._foreach_mul_(buffer, momentum)
            torch._foreach_add_(buffer, gradient)
            if nesterov:
                torch._foreach_add_(gradient, buffer, alpha=momentum)
            else:
                torch._foreach_copy_(gradient, buffer)
        rates = [lr] * len(anchor) if inner_lr is None else [lr * rate for rate in inner_lr]
        torch._foreach_mul_(gradient, rates)
        torch._foreach_sub_(anchor, gradient)
        torch._foreach_copy_(self.vector.views(average), anchor)


class SlowMo(OuterStep):
    """u <- beta u + (x_0 - x) / gamma, x_0 <- x_0 - alpha gamma u, with x the replicas' average at the end of a round.

    Momentum of whole rounds, over local SGD (1910.00643). gamma is the optimizer's learning rate, of each parameter
    group the mean over the round. Each replica's optimizer keeps its own state ("maintain" in section 2 of the paper).
    """

    options: SlowMoOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(SlowMoOptions(**options))

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        #: of each parameter the sum of the learning rates of the round's steps
        self._lr_sums: dict[nn.Parameter, float] = {}
        self._num_steps = 0

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        self._num_steps += 1
        for group in optimizer.param_groups:
            lr = float(group["lr"])
            for param in group["params"]:
                self._lr_sums[param] = self._lr_sums.get(param, 0.0) + lr

    def end_round(self, average: Tensor) -> None:
        options = self.options
        rates = [self._lr_sums.get(param, 0.0) / max(1, self._num_steps) for param in self.params]
        self.outer_step(average, lr=options.slow_lr, momentum=options.slow_momentum, nesterov=False, inner_lr=rates)
        self._lr_sums.clear()
        self._num_steps = 0

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


class DiLoCo(OuterStep):
    """An outer optimizer steps by what a round of the replicas' own steps has changed (2311.08105): its gradient is
    what the parameters were when the round began minus the replicas' average at its end.
    """

    options: DiLoCoOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(DiLoCoOptions(**options))

    def end_round(self, average: Tensor) -> None:
        options = self.options
        self.outer_step(average, lr=options.outer_lr, momentum=options.outer_momentum, nesterov=options.nesterov)
