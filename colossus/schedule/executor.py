"""Runs a checked schedule's actions on this rank's stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from colossus.layers.model_parallel import ModelParallel
from colossus.schedule.actions import COMPUTE, LAST_USE, Action
from colossus.schedule.transport import Transport, ValueSpec, batch_signature, flatten_value, unflatten_value

#: (stage, microbatch)
StageMicrobatch = tuple[int, int]
#: the deferred weight gradients of one backward: each call makes one and accumulates it
WgradTasks = list[Callable[[], None]]


class Stages(Protocol):
    """The stages of a model on this rank, as the executor calls them."""

    def forward(self, stage: int, microbatch: int, value: Any, batch: Any) -> Any:
        """Run a stage on what the stage before returned (None for the first). The last returns (loss sum, count)."""

    def is_trained(self, stage: int) -> bool:
        """Whether any parameter of a stage requires a gradient."""

    def before_backward(self, stage: int, microbatch: int, kind: str) -> None:
        """A ``backward`` follows, or one of its halves; with activation checkpointing it recomputes its forward."""

    def after_backward(self, stage: int, microbatch: int, kind: str) -> None:
        """It is done."""

    def full_backward(self) -> AbstractContextManager[None]:
        """Around a backward that makes the gradients of inputs and of weights (dgrad and wgrad)."""

    def deferred_wgrad(self) -> AbstractContextManager[WgradTasks]:
        """Around a backward that makes the gradients of inputs only: those of weights are left in the list."""

    def run_wgrad(self, tasks: WgradTasks) -> None:
        """Make the gradients of weights that `deferred_wgrad` left."""

    def before_last_backward(self, stage: int) -> None:
        """The action that follows completes the gradients of a stage's parameters."""

    def after_last_backward(self, stage: int) -> None:
        """The action that `before_last_backward` announced is done."""

    def reduce(self, stage: int) -> None:
        """No more gradients come for a stage: start those of its reductions that have not been started."""


class StepObserver:
    """Base of what is called while a step runs on this rank: override what you need, and append it to
    ``engine.observers``. What is around steps is a `colossus.engine.fit.Hook`.

    Attributes:
        needs_samples: whether `before_forward` wants the samples.
    """

    needs_samples = False

    def before_forward(self, stage: int, microbatch: int, samples: Any) -> None:
        """A stage is about to run; it has ended before another one begins.

        Args:
            samples: this rank's shard of the microbatch, the same for all stages, with all tokens of its sequences;
                None unless ``needs_samples``.
        """

    def after_forward(self, stage: int, microbatch: int, output: Any) -> None:
        """A stage has run; of the last stage, the loss has not."""

    def after_action(self, action: Action, began: float, ended: float) -> None:
        """An action of the schedule is done; times in seconds of `time.perf_counter`."""

    def before_update(self) -> None:
        """Gradients are complete, divided and clipped; the optimizer has not stepped.

        Also in a step that it will skip because some of them are not finite.
        """


@dataclass
class StepTotals:
    """Sums over the microbatches of a step on this rank, not yet over ranks; zeros on ranks without the last stage.

    Attributes:
        peak_in_flight: the most activations held at once, see `colossus.schedule.actions.in_flight`.
    """

    loss_sum: Tensor
    tokens: Tensor
    peak_in_flight: int


@dataclass
class _State:
    """The intermediate results of a step."""

    batches: Sequence[Any]
    batch_shape: Hashable
    #: see `Executor.run`
    loss_scale: Tensor | None = None
    #: tensors of a stage's input, detached from the stage before, that get a gradient
    roots: dict[StageMicrobatch, list[Tensor]] = field(default_factory=dict)
    #: a stage's output, until it is sent or a stage of the same rank takes it
    outputs: dict[StageMicrobatch, tuple[ValueSpec, list[Tensor]]] = field(default_factory=dict)
    #: where the backward of a stage begins
    edges: dict[StageMicrobatch, list[GradientEdge]] = field(default_factory=dict)
    #: gradients of a stage's input, until they are sent or a stage of the same rank takes them
    input_gradients: dict[StageMicrobatch, list[Tensor]] = field(default_factory=dict)
    wgrad_tasks: dict[StageMicrobatch, WgradTasks] = field(default_factory=dict)
    loss_sums: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    in_flight: int = 0
    peak_in_flight: int = 0


class Executor:
    """Runs the actions of one rank, of checked schedules that place the stages alike.

    Args:
        stages: those of this rank.
        rank_of: stage -> index of the rank that has it.
        transport: to other ranks; None when there is one rank.
        parallel: of the model's layers.
        observers: told of every action; the list may change between steps.
    """

    def __init__(
        self,
        stages: Stages,
        rank_of: Mapping[int, int],
        transport: Transport | None,
        parallel: ModelParallel,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        self.stages, self.rank_of, self.transport = stages, rank_of, transport
        self.parallel, self.observers = parallel, observers
        self.last_stage = max(rank_of)

    def run(
        self,
        actions: Sequence[Action],
        batches: Sequence[Any],
        step_id: object = None,
        loss_scale: Tensor | None = None,
    ) -> StepTotals:
        """Run one step, or the forwards of one evaluation.

        The loss of a microbatch is backpropagated as its sum: no rank and no microbatch knows the number of valid
        tokens of the global batch before the end of the step, so gradients are sums here and are divided once, when
        they have been reduced. This is the one place that decides how a loss is scaled.

        Args:
            actions: of this rank, in order.
            batches: the microbatches, of equal shapes, the same on all ranks of a model.
            step_id: identifies the step, the same on all ranks of a model; two ranks that disagree get an error.
            loss_scale: what losses are multiplied by before they are backpropagated, scalar; None does not. The sums
                that are returned are not scaled.

        Raises:
            ValueError: when a stage returns what cannot be passed to the next.
        """
        state = _State(batches, batch_signature(batches[0]), loss_scale)
        if self.transport is not None:
            self.transport.step_id = step_id
        # stage -> index of the action that completes its gradients
        last_backwards = {action.stage: index for index, action in enumerate(actions) if action.kind in LAST_USE}
        early = _receives_after(actions) if self.transport is not None and self.transport.links.takes_early else {}
        for index, action in enumerate(actions):
            began = time.perf_counter() if self.observers else 0.0
            for receive in early.get(index, ()):
                if not self.transport.post_receive(receive, state.batch_shape, early=True):  # type: ignore[union-attr]
                    break
            if last_backwards.get(action.stage) == index:
                self.stages.before_last_backward(action.stage)
                self._do(action, state)
                self.stages.after_last_backward(action.stage)
            else:
                self._do(action, state)
            for observer in self.observers:
                observer.after_action(action, began, time.perf_counter())
        if self.transport is not None:
            self.transport.flush()
        zero = torch.zeros((), dtype=torch.float64, device=self.parallel.context.device)
        return StepTotals(_total(state.loss_sums, zero), _total(state.counts, zero), state.peak_in_flight)

    def _do(self, action: Action, state: _State) -> None:
        kind, key = action.kind, (action.stage, action.microbatch)
        if kind == "forward":
            self._forward(key, state)
        elif kind in COMPUTE:
            self.stages.before_backward(*key, kind)
            if kind == "backward":
                with self.stages.full_backward():
                    self._backward(key, state)
            elif kind == "backward_input":  # what the weights' half needs is held until then
                with self.stages.deferred_wgrad() as tasks:
                    self._backward(key, state)
                state.wgrad_tasks[key] = tasks
            else:
                with torch.no_grad():
                    self.stages.run_wgrad(state.wgrad_tasks.pop(key))
            state.in_flight -= kind in LAST_USE
            self.stages.after_backward(*key, kind)
        elif kind == "reduce":
            self.stages.reduce(action.stage)
        elif kind != "step":  # the optimizer steps in the engine, once it has the norm of all gradients
            assert self.transport is not None
            if kind == "send_activation":
                spec, tensors = state.outputs.pop(key)
                self.transport.send_value(action, spec, tensors, state.batch_shape)
            elif kind == "send_gradient":
                self.transport.send(action, state.input_gradients.pop(key))
            else:
                self.transport.post_receive(action, state.batch_shape)

    def _forward(self, key: StageMicrobatch, state: _State) -> None:
        stage, microbatch = key
        value = None
        if stage:
            if self.rank_of[stage - 1] == self.rank_of[stage]:
                spec, tensors = state.outputs.pop((stage - 1, microbatch))
                # a copy: this stage may write to its input in place, and the stage before has saved it for backward
                tensors = [tensor.clone() for tensor in tensors]
            else:
                assert self.transport is not None
                spec, tensors = self.transport.wait_value(stage, microbatch)
            value, state.roots[key] = unflatten_value(spec, tensors, self.parallel)
        out = self.stages.forward(stage, microbatch, value, state.batches[microbatch])
        state.in_flight += 1
        state.peak_in_flight = max(state.peak_in_flight, state.in_flight)
        if stage == self.last_stage:
            loss, count = out
            state.loss_sums.append(loss.detach())
            state.counts.append(count)
            if torch.is_grad_enabled():
                if not loss.requires_grad:
                    raise ValueError(
                        f"the loss of microbatch {microbatch} does not require a gradient: is a result detached, or "
                        f"computed under no_grad, or are all parameters frozen? Where no label counts, it is a sum of "
                        f"nothing that comes from the outputs: outputs.sum() * 0.0, and a count of 0"
                    )
                state.edges[key] = [get_gradient_edge(loss)]
            return
        spec, tensors = flatten_value(out, self.parallel, f"stage {stage}")
        edges = [
            get_gradient_edge(tensor) for tensor, leaf in zip(tensors, spec.tensors, strict=True) if leaf.needs_gradient
        ]
        if torch.is_grad_enabled():
            if not edges and (state.roots.get(key) or self.stages.is_trained(stage)):
                raise ValueError(
                    f"stage {stage} returned {spec}, of which nothing requires a gradient: the parameters of "
                    f"this stage and those before it would never change. Does a block detach its output, or return "
                    f"integers only?"
                )
            state.edges[key] = edges
        # detached from its graph: an output that backward does not need is freed as soon as it is sent
        state.outputs[key] = spec, [tensor.detach() for tensor in tensors]

    def _backward(self, key: StageMicrobatch, state: _State) -> None:
        stage, microbatch = key
        if stage == self.last_stage:
            # None is 1.0 to autograd; given a tensor it would import sympy, 0.5 s on each rank
            seed = None if state.loss_scale is None else state.loss_scale.to(state.loss_sums[-1].dtype)
            output_gradients: list[Tensor | None] = [seed]
        elif self.rank_of[stage + 1] == self.rank_of[stage]:
            output_gradients = list(state.input_gradients.pop((stage + 1, microbatch)))
        else:
            assert self.transport is not None
            output_gradients = list(self.transport.wait_gradient(stage, microbatch))
        edges = state.edges.pop(key)
        if edges:  # given tensors, backward would turn off torch function modes, which a recomputed forward needs
            torch.autograd.backward(edges, output_gradients)
        if stage:
            roots = state.roots.pop(key)  # those that were not used have zeros
            grads = [root.grad if root.grad is not None else torch.zeros_like(root) for root in roots]
            state.input_gradients[key] = grads


def forward_only(actions: Sequence[Action], microbatches: int) -> list[Action]:
    """The actions of a rank's list that an evaluation needs, for as many microbatches as it has.

    All ranks keep the order of the full lists, so the rest of a schedule without deadlock has none either.
    """
    kinds = ("forward", "send_activation", "receive_activation")
    return [action for action in actions if action.kind in kinds and action.microbatch < microbatches]


def _receives_after(actions: Sequence[Action]) -> dict[int, list[Action]]:
    """Index of each compute action -> the receives between it and the next one: posted early, they overlap with it."""
    out: dict[int, list[Action]] = {}
    receives: list[Action] = []
    for index, action in enumerate(actions):
        if action.kind in COMPUTE:
            receives = out[index] = []
        elif action.kind in ("receive_activation", "receive_gradient"):
            receives.append(action)
    return out


def _total(values: list[Tensor], zero: Tensor) -> Tensor:
    if not values:
        return zero
    return values[0].double() if len(values) == 1 else torch.stack([value.double() for value in values]).sum()
