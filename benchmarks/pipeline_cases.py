"""The cases of the pipeline benchmark: a plain loop, torch.distributed.pipelining, and colossus; the same modules."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import colossus
from benchmarks.pipeline_model import chain, filled_chain, loss_sum, split
from benchmarks.workload import CLIP_NORM, LEARNING_RATE, Workload
from colossus.checkpoint import load_full_state_dict
from colossus.engine.engine import Engine
from colossus.schedule.executor import StepTotals


@dataclass(frozen=True)
class Setup:
    """A run of ``workload.batch`` samples in so many microbatches, through so many stages."""

    workload: Workload
    stages: int
    microbatches: int

    def __str__(self) -> str:
        w = self.workload
        return (
            f"hidden {w.hidden} x {w.layers} blocks, {w.tokens} tokens; {self.stages} stages, {self.microbatches} "
            f"microbatches of {w.batch // self.microbatches}"
        )


class Run(ABC):
    """A case on one rank."""

    @abstractmethod
    def passes(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Run forward and backward of all microbatches; return the sum of their losses on the rank of the last stage.

        Gradients start from nothing, and are sums, too.
        """

    @abstractmethod
    def step(self, ids: Tensor, labels: Tensor) -> tuple[float, float]:
        """Run an optimizer step; return the global mean loss and the gradient norm before clipping."""

    @abstractmethod
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this rank by their names in the chain."""


class Loop(Run):
    """The loop of a careful user around the passes: clipping by the global norm, fused AdamW, one small all-reduce."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self.optimizer = torch.optim.AdamW(list(parameters.values()), lr=LEARNING_RATE, fused=True)

    def parameters(self) -> dict[str, nn.Parameter]:
        return self._parameters

    def step(self, ids: Tensor, labels: Tensor) -> tuple[float, float]:
        loss = self.passes(ids, labels)
        grads = [param.grad for param in self._parameters.values() if param.grad is not None]
        square = torch.stack(torch._foreach_norm(grads)).double().square().sum()
        numbers = torch.stack([loss.double(), square])
        if dist.is_initialized():
            dist.all_reduce(numbers)
        norm = numbers[1].sqrt() / labels.numel()
        scale = (CLIP_NORM / (norm + 1e-6)).clamp(max=1.0) / labels.numel()
        torch._foreach_mul_(grads, scale.to(grads[0].dtype))
        self.optimizer.step()
        return numbers[0].item() / labels.numel(), norm.item()


class Serial(Loop):
    """One process; gradients are accumulated over the microbatches."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self._model, self._microbatches = filled_chain(setup.workload), setup.microbatches
        super().__init__(dict(self._model.named_parameters()))

    def passes(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for own, targets in zip(ids.chunk(self._microbatches), labels.chunk(self._microbatches), strict=True):
            loss = loss_sum(self._model(own), targets)
            loss.backward()
            total += loss.detach()
        return total


class Torch(Loop):
    """torch.distributed.pipelining: one PipelineStage of the chain's modules on each rank."""

    def __init__(self, setup: Setup, rank: int) -> None:
        model, counts = filled_chain(setup.workload), split(setup.workload.layers, setup.stages)
        modules = nn.Sequential(*list(model)[sum(counts[:rank]) : sum(counts[: rank + 1])])
        stage = PipelineStage(modules, rank, setup.stages, torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, setup.microbatches, loss_fn=loss_sum, scale_grads=False)
        self._is_first, self._is_last = rank == 0, rank == setup.stages - 1
        own = {id(param) for param in modules.parameters()}
        super().__init__({name: param for name, param in model.named_parameters() if id(param) in own})

    def passes(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        inputs = (ids,) if self._is_first else ()
        if self._is_last:
            self._schedule.step(*inputs, target=labels, losses=losses, return_outputs=False)
        else:
            self._schedule.step(*inputs, return_outputs=False)
        return torch.stack(losses).detach().sum() if losses else torch.zeros(())


class Ours(Run):
    """colossus by its public interface; the passes by what its engine calls for them."""

    def __init__(self, setup: Setup, rank: int, schedule: str) -> None:
        w = setup.workload
        config: dict[str, Any] = {
            "parallel": {"pipeline": {"size": setup.stages, "split": split(w.layers, setup.stages)}},
            "schedule": {"type": schedule, "microbatches": setup.microbatches},
            "optimizer": {"type": "AdamW", "lr": LEARNING_RATE},
            "train": {"global_batch_size": w.batch, "clip_grad_norm": CLIP_NORM},
        }
        self.engine = colossus.initialize(config, model=lambda: chain(w), loss_fn=_loss)
        load_full_state_dict(self.engine.model, filled_chain(w).state_dict(), self.engine.context)

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.engine.model.named_parameters())

    def passes(self, ids: Tensor, labels: Tensor) -> Tensor:
        return engine_passes(self.engine, {"inputs": ids, "labels": labels}).loss_sum

    def step(self, ids: Tensor, labels: Tensor) -> tuple[float, float]:
        result = self.engine.train_step({"inputs": ids, "labels": labels})
        return result.loss, result.grad_norm


def _loss(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return loss_sum(outputs, batch["labels"]), torch.tensor(batch["labels"].numel())


def engine_passes(engine: Engine, batch: Any) -> StepTotals:
    """Run `Engine.train_step` up to where all gradients are there."""
    return engine.accumulate_gradients(engine.inputs.split(batch, engine.config.schedule.microbatches))


@dataclass(frozen=True)
class Case:
    """A case and how it is built.

    Attributes:
        is_pipelined: whether it runs on one rank for each stage, rather than on one.
    """

    name: str
    maker: Callable[..., Run]
    options: Sequence[str] = ()
    is_pipelined: bool = True

    def world(self, setup: Setup) -> int:
        return setup.stages if self.is_pipelined else 1

    def build(self, setup: Setup, rank: int) -> Run:
        return self.maker(setup, rank, *self.options)


SERIAL, TORCH = "serial", "torch-1f1b"
CASES = {
    case.name: case
    for case in (
        Case(SERIAL, Serial, is_pipelined=False),
        Case(TORCH, Torch),
        Case("colossus-1f1b", Ours, ("1f1b",)),
        Case("colossus-zb-h1", Ours, ("zb-h1",)),
    )
}

#: name -> a parameter's gradient
Gradients = dict[str, "np.ndarray[Any, np.dtype[np.float32]]"]


class Worker:
    """A case on one rank, for a `RankGroup`."""

    def __init__(self, case: Case, setup: Setup, rank: int) -> None:
        self.run: Run = case.build(setup, rank)
        self._batches = setup.workload.batches()
        self._done = 0

    def passes(self) -> tuple[float, Gradients]:
        """Return the sum of losses (0 where another rank has it) and the gradients of the first batch."""
        loss = self.run.passes(*self._batches[0]).item()
        parameters = self.run.parameters().items()
        return loss, {name: param.grad.numpy() for name, param in parameters if param.grad is not None}

    def steps(self, count: int) -> list[tuple[float, float]]:
        """Return loss and gradient norm of each step."""
        return [self.run.step(*self._next()) for _ in range(count)]

    def block(self, what: str, count: int) -> tuple[float, float]:
        """Return the seconds of a ``passes`` or ``step``, and those of this processor.

        The first is not timed: caches hold what another case left there.
        """
        call = getattr(self.run, what)
        call(*self._next())
        begin, busy = time.perf_counter(), time.process_time()
        for _ in range(count):
            call(*self._next())
        return (time.perf_counter() - begin) / count, (time.process_time() - busy) / count

    def _next(self) -> tuple[Tensor, Tensor]:
        self._done += 1
        return self._batches[self._done % len(self._batches)]
