"""Four small data-parallel strategies, none of them all-reduce, that stand on what the engine offers to all."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.engine.gradients.reduction import GradientReduction
from colossus.engine.parameter_store import ParameterStore
from colossus.engine.parts import ModelParts
from colossus.engine.strategies.all_reduce import AllReduce
from colossus.engine.strategies.strategy import Strategy


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


class Delayed(AllReduce):
    """Every step applies the gradients of the step before; the first applies none."""

    _kept: dict[nn.Parameter, Tensor | None] | None = None

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        params = self.optimizer_parameters()
        current = {param: None if param.grad is None else param.grad.clone() for param in params}
        if self._kept is not None:
            for param in params:
                param.grad = self._kept[param]
            optimizer.step()
        self._kept = current


class OwnSGD(AllReduce):
    """Owns the optimizer: SGD with momentum, each parameter stepped by one data rank, which gives it to the others."""

    def __init__(self, lr: float, momentum: float) -> None:
        self._lr, self._momentum = lr, momentum

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        self._data = parts.context.group("data")
        self._owner = {param: number % self._data.size for number, param in enumerate(store.trainable())}
        self._velocity: dict[nn.Parameter, Tensor] = {}

    def optimizer_parameters(self) -> list[nn.Parameter]:
        return []

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


class Sharded(Strategy):
    """Stores rows of every parameter on each rank along ``axes``; blocks gather theirs while they run."""

    def __init__(self, axes: tuple[str, ...] = ("data",)) -> None:
        self._axes = axes

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        store.shard(self._axes)
        super().setup(store, parts)
        stored = replace(
            parts,
            parameters_by_stage={
                stage: [store.stored(param) for param in params] for stage, params in parts.parameters_by_stage.items()
            },
            tied=[(store.stored(param), ranks) for param, ranks in parts.tied],
        )
        self._rest = GradientReduction(stored, self.summed_axes)

    def reduce(self, stage: int) -> None:
        self.store.start_scatter(self.parts.parameters_by_stage[stage])

    def finish(self) -> None:
        self.store.finish_scatter()
        for stage in self.parts.parameters_by_stage:
            self._rest.arm(stage)
            self._rest.start(stage)
        self._rest.finish()

    def abandon(self) -> None:
        self._rest.abandon()
