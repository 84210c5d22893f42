"""A model whose stages sleep for a known time, and what one of its steps looked like on a rank."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

import colossus
from benchmarks.pipeline_cases import engine_passes
from colossus.context.parallel_context import current_context
from colossus.layers.model_parallel import model_parallel_of
from colossus.schedule.actions import Action
from colossus.schedule.executor import StepObserver
from colossus.schedule.simulate import Times
from colossus.tensor_parallel.gathered_weights import GatheredWeights

SAMPLE = 16


@dataclass(frozen=True)
class Task:
    """A schedule to run.

    Attributes:
        chunks: stages on each rank.
        seconds: that a rank's forward of one microbatch takes, and so do its dgrad and its wgrad.
    """

    schedule: str
    ranks: int
    microbatches: int
    chunks: int
    seconds: float

    @property
    def times(self) -> Times:
        """Return the times of the simulation."""
        own = self.seconds / self.chunks
        return Times(forward=own, backward=2 * own, backward_input=own, backward_weight=own)


def weight() -> Tensor:
    """Return the factors by which every stage multiplies its input."""
    return torch.linspace(0.9, 1.1, SAMPLE)


class _Spans(StepObserver):
    """Keeps when each action ran."""

    def __init__(self, spans: list[tuple[Action, float, float]]) -> None:
        self._spans = spans

    def after_action(self, action: Action, began: float, ended: float) -> None:
        self._spans.append((action, began, ended))


class _Sleep(torch.autograd.Function):
    """Scales its input by a weight, slowly."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float, weights: GatheredWeights) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.seconds, ctx.weights = seconds, weights
        time.sleep(seconds)
        return x * weight

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        seconds: float = ctx.seconds

        def gradient() -> Tensor:
            time.sleep(seconds)
            return (dy * x).sum(0)

        time.sleep(seconds)
        dx = dy * weight
        if ctx.weights.deferral.is_active:
            ctx.weights.deferral.defer(lambda: ctx.weights.deferral.accumulate(weight, gradient()))
            return dx, None, None, None
        return dx, gradient(), None, None


class Sleep(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.parallel, self.seconds = model_parallel_of(current_context()), seconds
        self.weight = nn.Parameter(weight())

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.weight, self.seconds, self.parallel.weights)


@dataclass(frozen=True)
class Played:
    """One step on one rank.

    Attributes:
        spans: every action with its start and end, by a clock that all processes share.
        peak: the most activations in flight.
    """

    spans: list[tuple[Action, float, float]]
    peak: int


class Worker:
    """A rank of a pipeline of sleeping stages, for a `RankGroup`."""

    def __init__(self, task: Task, rank: int) -> None:
        stages = task.ranks * task.chunks
        config: dict[str, Any] = {
            "parallel": {"pipeline": {"size": task.ranks, "split": [1] * stages}},
            "schedule": {"type": task.schedule, "microbatches": task.microbatches},
            "train": {"global_batch_size": task.microbatches},
        }
        own = task.seconds / task.chunks
        self._engine = colossus.initialize(
            config,
            model=lambda: nn.Sequential(*(Sleep(own) for _ in range(stages))),
            loss_fn=lambda outputs, batch: (outputs.sum(), torch.tensor(len(outputs))),
        )
        self._batch = torch.ones(task.microbatches, SAMPLE)

    def play(self) -> Played:
        """Run the passes of one step; all ranks begin together."""
        spans: list[tuple[Action, float, float]] = []
        self._engine.observers[:] = [_Spans(spans)]
        dist.barrier()
        peak = engine_passes(self._engine, self._batch).peak_in_flight
        return Played(spans, peak)

    def gradients(self) -> dict[str, Any]:
        """Return the gradients of the last step by the name of the weight."""
        parameters = self._engine.model.named_parameters()
        return {name: param.grad.numpy() for name, param in parameters if param.grad is not None}
