"""Runs a checked schedule's actions on this rank's stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from colossus.layers.model_parallel import ModelParallel
from colossus.schedule.actions import COMPUTE, LAST_USE, Action
from colossus.schedule.runtime.transport import Transport
from colossus.schedule.runtime.values import flatten_value, gradients, signature, unflatten_value

#: (stage, microbatch)
Key = tuple[int, int]
Work = list[Callable[[], None]]
#: told of every action: what, when it began, when it ended, in seconds of `time.perf_counter`
Watcher = Callable[[Action, float, float], None]


class Stages(Protocol):
    """What the executor calls: the stages of a model, and what surrounds their gradients."""

    def forward(self, stage: int, microbatch: int, value: Any, batch: Any) -> Any:
        """Run a stage on what the stage before returned (None for the first). The last returns (sum, count)."""

    def is_trained(self, stage: int) -> bool:
        """Whether any parameter of a stage wants a gradient."""

    def before_backward(self, microbatch: int) -> None:
        """A backward of this microbatch follows, which may recompute parts of its forward."""

    def whole(self) -> AbstractContextManager[None]:
        """Around a backward that is not in halves."""

    def run_wgrad(self, work: Work) -> None:
        """Make the gradients of weights that `deferring` left."""

    def deferring(self) -> AbstractContextManager[Work]:
        """Backward inside makes gradients of inputs only, and leaves those of weights in the list."""

    def before_last(self, stage: int) -> None:
        """What follows completes the gradients of a stage's parameters."""

    def after_last(self, stage: int) -> None:
        """What `before_last` announced is done."""

    def reduce(self, stage: int) -> None:
        """No more gradients come for a stage: start what is left of their reduction."""


@dataclass
class Totals:
    """Sums over the microbatches of a step on this rank, not yet over ranks; zeros where the last stage is elsewhere.

    Attributes:
        peak_in_flight: the most activations held at once: (stage, microbatch) between forward and last backward.
    """

    loss_sum: Tensor
    tokens: Tensor
    peak_in_flight: int


@dataclass
class _State:
    """What a step has made so far."""

    batches: Sequence[Any]
    shape: Hashable
    roots: dict[Key, list[Tensor]] = field(default_factory=dict)
    #: a stage's output on the way to a stage of the same rank
    passed: dict[Key, Any] = field(default_factory=dict)
    edges: dict[Key, list[GradientEdge]] = field(default_factory=dict)
    #: gradients of a stage's input
    made: dict[Key, list[Tensor]] = field(default_factory=dict)
    later: dict[Key, Work] = field(default_factory=dict)
    sums: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    in_flight: int = 0
    peak: int = 0


class Executor:
    """Runs the lists of one rank, of checked schedules for one placement of stages.

    Args:
        stages: what is called.
        rank_of: stage -> index of the rank that has it.
        transport: brings values to other ranks; None when there is one rank.
        parallel: of the model's layers.
        watch: told of every action with its times; for measurements.
    """

    def __init__(
        self,
        stages: Stages,
        rank_of: Mapping[int, int],
        transport: Transport | None,
        parallel: ModelParallel,
        watch: Watcher | None = None,
    ) -> None:
        self.stages, self.rank_of, self.transport, self.parallel, self.watch = (
            stages,
            rank_of,
            transport,
            parallel,
            watch,
        )
        self.last = max(rank_of)

    def run(self, actions: Sequence[Action], batches: Sequence[Any], mark: object = None) -> Totals:
        """Run one step, or the forwards of one evaluation.

        The loss of a microbatch is backpropagated as its sum: no rank and no microbatch knows the number of valid
        tokens of the global batch before all are through, so gradients are sums here and are divided once, when they
        have been reduced. This is the one place that decides how a loss is scaled.

        Args:
            actions: of this rank, in order.
            batches: the microbatches, of equal shapes, the same on all ranks of a model.
            mark: what this step is about, the same on all ranks of a model; two ranks that do not agree are told.

        Raises:
            ValueError: when a stage returns what cannot go on to the next.
        """
        state = _State(batches, signature(batches[0]))
        if self.transport is not None:
            self.transport.mark = mark
        final = _last_uses(actions)
        receives = _ahead(actions) if self.transport is not None and self.transport.takes_early else None
        for index, action in enumerate(actions):
            began = time.perf_counter() if self.watch is not None else 0.0
            if receives is not None and action.kind in COMPUTE:
                for coming in next(receives):
                    self.transport.await_early(coming, state.shape)  # type: ignore[union-attr]
            if index in final:
                self.stages.before_last(action.stage)
                self._do(action, state)
                self.stages.after_last(action.stage)
            else:
                self._do(action, state)
            if self.watch is not None:
                self.watch(action, began, time.perf_counter())
        if self.transport is not None:
            self.transport.flush()
        zero = torch.zeros((), dtype=torch.float64, device=self.parallel.context.device)
        return Totals(_total(state.sums, zero), _total(state.counts, zero), state.peak)

    def _do(self, action: Action, state: _State) -> None:
        key = action.stage, action.microbatch
        kind = action.kind
        if kind == "forward":
            self._forward(key, state)
        elif kind == "backward":
            self.stages.before_backward(action.microbatch)
            with self.stages.whole():
                self._backward(key, state)
            state.in_flight -= 1
        elif kind == "backward_input":
            self.stages.before_backward(action.microbatch)
            with self.stages.deferring() as work:
                self._backward(key, state)
            state.later[key] = work
        elif kind == "backward_weight":
            with torch.no_grad():
                self.stages.run_wgrad(state.later.pop(key))
            state.in_flight -= 1
        elif kind == "reduce":
            self.stages.reduce(action.stage)
        elif kind != "step":  # the engine steps, once it has the norm of all gradients
            self._transfer(action, key, state)

    def _transfer(self, action: Action, key: Key, state: _State) -> None:
        assert self.transport is not None
        if action.kind == "send_activation":
            description, tensors = state.passed.pop(key)
            self.transport.send_value(action, description, tensors, state.shape)
        elif action.kind == "send_gradient":
            self.transport.send(action, state.made.pop(key))
        elif action.kind == "receive_activation":
            self.transport.await_value(action, state.shape)
        else:
            self.transport.await_gradient(action, state.shape)

    def _forward(self, key: Key, state: _State) -> None:
        stage, index = key
        before = (stage - 1, index)
        value = None
        if stage:
            if self.rank_of[stage - 1] == self.rank_of[stage]:
                description, tensors = state.passed.pop(before)
                # what backward of that stage has kept must not change when this one begins in place
                tensors = [tensor.clone() for tensor in tensors]
            else:
                assert self.transport is not None
                description, tensors = self.transport.value(stage, index)
            value, state.roots[key] = unflatten_value(description, tensors, self.parallel)
        out = self.stages.forward(stage, index, value, state.batches[index])
        state.in_flight += 1
        state.peak = max(state.peak, state.in_flight)
        if stage == self.last:
            loss, count = out
            state.sums.append(loss.detach())
            state.counts.append(count)
            if torch.is_grad_enabled():
                state.edges[key] = [_edge_of_loss(loss, index)]
            return
        description, tensors = flatten_value(out, self.parallel, f"stage {stage}")
        edges = [
            get_gradient_edge(tensor)
            for tensor, leaf in zip(tensors, description.tensors, strict=True)
            if leaf.needs_gradient
        ]
        if torch.is_grad_enabled():
            if not edges and (state.roots.get(key) or self.stages.is_trained(stage)):
                raise ValueError(
                    f"stage {stage} returned {description}, of which nothing requires a gradient: the parameters of "
                    f"this stage and those before it would never change. Does a block detach its output, or return "
                    f"integers only?"
                )
            state.edges[key] = edges
        # without its graph: an output that no backward needs is freed as soon as it is sent
        state.passed[key] = description, [tensor.detach() for tensor in tensors]

    def _backward(self, key: Key, state: _State) -> None:
        stage, index = key
        if stage == self.last:
            # None is 1.0 to autograd; a tensor would make it import sympy, 0.5 s on each rank
            arrived: list[Tensor | None] = [None]
        elif self.rank_of[stage + 1] == self.rank_of[stage]:
            arrived = list(state.made.pop((stage + 1, index)))
        else:
            assert self.transport is not None
            arrived = list(self.transport.gradient(stage, index))
        edges = state.edges.pop(key)
        if edges:  # edges, not tensors: what is recomputed inside is then reached by function modes
            torch.autograd.backward(edges, arrived)
        if stage:
            state.made[key] = gradients(state.roots.pop(key))


def _edge_of_loss(loss: Tensor, microbatch: int) -> GradientEdge:
    if not loss.requires_grad:
        raise ValueError(
            f"the loss of microbatch {microbatch} does not require a gradient: nothing that it was computed from does. "
            f"Is a result detached, or computed under no_grad, or are all parameters frozen?"
        )
    return get_gradient_edge(loss)


def forwards(actions: Sequence[Action], microbatches: int) -> list[Action]:
    """What is left of a rank's list when nothing is trained, for the first few microbatches.

    The ranks keep the order of the whole lists, so what could not hang cannot hang now.
    """
    kinds = ("forward", "send_activation", "receive_activation")
    return [action for action in actions if action.kind in kinds and action.microbatch < microbatches]


def _last_uses(actions: Sequence[Action]) -> set[int]:
    """Indices of the actions that complete the gradients of a stage."""
    return set({action.stage: index for index, action in enumerate(actions) if action.kind in LAST_USE}.values())


def _ahead(actions: Sequence[Action]) -> Iterator[list[Action]]:
    """For each compute action the receives between it and the next one: they are awaited while it runs."""
    coming: list[Action] = []
    is_first = True
    for action in actions:
        if action.kind in COMPUTE:
            if not is_first:
                yield coming
            coming, is_first = [], False
        elif action.kind in ("receive_activation", "receive_gradient"):
            coming.append(action)
    yield coming


def _total(values: list[Tensor], zero: Tensor) -> Tensor:
    if not values:
        return zero
    return values[0].double() if len(values) == 1 else torch.stack([value.double() for value in values]).sum()
