"""Small data-parallel strategies, none of them all-reduce, that stand on what the engine offers to all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.data_parallel.all_reduce import AllReduce
from colossus.data_parallel.options.strategy_options import PerReplicaOptions
from colossus.data_parallel.per_replica import PerReplica
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.reduction import ModelParts


class LocalSteps(AllReduce):
    """Replicas step on their own gradients, and average their weights after every ``every``-th step."""

    exact = False

    def __init__(self, every: int) -> None:
        self._every = every

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if (step + 1) % self._every:
            return
        group = self.parts.context.group("data")
        for param in self.store.parameters():
            param.copy_(collectives.all_reduce(param.clone(), group, owned=True).wait() / group.size)


class Apart(PerReplica):
    """Replicas never mix. With ``travelling`` replica i has the weight 1 + i * travelling in the average."""

    def __init__(self, travelling: float = 0.0, **options: Any) -> None:
        super().__init__(PerReplicaOptions(**options))
        self._travelling = travelling

    def average_addend(self) -> tuple[list[Tensor], float]:
        params, weight = super().average_addend()
        more = self._travelling * self.parts.context.index("data")
        return [param + more * param for param in params], weight + more


class OwnSGD(AllReduce):
    """Owns the optimizer: SGD with momentum, each parameter stepped by one data rank, which gives it to the others."""

    def __init__(self, lr: float, momentum: float) -> None:
        self._lr, self._momentum = lr, momentum

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        self._data = parts.context.group("data")
        self._owner = {param: number % self._data.size for number, param in enumerate(store.trainable())}
        self._velocity: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def update(self, optimizer: torch.optim.Optimizer) -> None:
        for param, owner in self._owner.items():
            if owner == self._data.index and param.grad is not None:
                velocity = self._velocity.setdefault(param, torch.zeros_like(param))
                velocity.mul_(self._momentum).add_(param.grad)
                param.sub_(velocity, alpha=self._lr)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        for param, owner in self._owner.items():
            param.copy_(collectives.broadcast(param.clone(), self._data, owner))
