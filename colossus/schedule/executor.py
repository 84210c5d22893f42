"""The executor, which runs a checked schedule's actions on this rank's stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from colossus.comm.step_regions import over_replicas, timed
from colossus.layers.model_parallel import ModelParallel
from colossus.schedule.actions import COMPUTE, LAST_USE, Action, region_of
from colossus.schedule.transport import Transport, ValueSpec, batch_signature, flatten_value, unflatten_value

#: (stage, microbatch)
StageMicrobatch = tuple[int, int]
#: the deferred weight gradients of one backward: each call makes one and accumulates it
WgradTasks = list[Callable[[], None]]


class Stages(Protocol):
    """The stages of a model on this rank, as the executor calls them."""

    def forward(self, stage: int, microbatch: int, value: Any, batch: Any) -> Any:
        """Run a stage on the output of the stage before (None for the first). The last returns (loss sum, count)."""

    def is_trained(self, stage: int) -> bool:
        """Return whether any parameter of a stage requires a gradient."""

    def before_backward(self, stage: int, microbatch: int, kind: str) -> None:
        """Prepare a ``backward`` or one of its halves; activation checkpointing recomputes the forward in it."""

    def after_backward(self, stage: int, microbatch: int, kind: str) -> None:
        """End the backward that `before_backward` prepared."""

    def full_backward(self) -> AbstractContextManager[None]:
        """Return a context for a backward that makes the gradients of inputs and of weights (dgrad and wgrad)."""

    def deferred_wgrad(self) -> AbstractContextManager[WgradTasks]:
        """Return a context for a backward that makes dgrads only, and appends the wgrads to the list as tasks."""

    def run_wgrad(self, tasks: WgradTasks) -> None:
        """Make the gradients of weights that `deferred_wgrad` deferred."""

    def before_last_backward(self, stage: int) -> None:
        """Prepare the action that completes the gradients of a stage's parameters."""

    def after_last_backward(self, stage: int) -> None:
        """End the action that `before_last_backward` prepared."""

    def reduce(self, stage: int) -> None:
        """Start the remaining reductions of a stage, whose gradients are complete."""


class StepObserver:
    """The base of observers of a step on this rank: override methods, and append the object to ``engine.observers``.

    A `colossus.engine.fit.Hook` is called around steps, an observer inside them.

    Attributes:
        needs_samples: whether `before_forward` gets the samples.
    """

    needs_samples = False

    def before_forward(self, stage: int, microbatch: int, samples: Any) -> None:
        """Observe that a stage is about to run; the stage before it has ended.

        Args:
            stage: the stage.
            microbatch: the microbatch.
            samples: this rank's shard of the microbatch, the same for all stages, with all tokens of its sequences;
                None unless ``needs_samples``.
        """

    def after_forward(self, stage: int, microbatch: int, output: Any) -> None:
        """Observe that a stage has run; the loss of the last stage has not."""

    def after_action(self, action: Action, began: float, ended: float) -> None:
        """Observe that an action of the schedule is done; times in seconds of `time.perf_counter`."""

    def before_update(self) -> None:
        """Observe gradients that are complete, divided and clipped, before the optimizer steps.

        Also called in a step that the optimizer will skip because gradients are not finite.
        """


@dataclass
class StepTotals:
    """This rank's sums over the microbatches of a step, not yet over ranks; zeros on ranks without the last stage.

    Attributes:
        loss_sum: the sum of the losses, scalar.
        tokens: the number of valid tokens, scalar.
        peak_in_flight: the most activations stored at once, see `colossus.schedule.actions.in_flight`.
    """

    loss_sum: Tensor
    tokens: Tensor
    peak_in_flight: int


@dataclass
class _State:
    """The intermediate results of a step."""

    batches: Sequence[Any]
    #: see `Executor.run`
    loss_scale: Tensor | None = None
    #: of each microbatch, for messages to other stages; empty without a pipeline
    signatures: Sequence[Hashable] = ()
    #: tensors of a stage's input, detached from the stage before, that get a gradient
    roots: dict[StageMicrobatch, list[Tensor]] = field(default_factory=dict)
    #: a stage's output, until it is sent or a stage of the same rank takes it
    outputs: dict[StageMicrobatch, tuple[ValueSpec, list[Tensor]]] = field(default_factory=dict)
    #: the autograd edges from which the backward of a stage starts
    edges: dict[StageMicrobatch, list[GradientEdge]] = field(default_factory=dict)
    #: gradients of a stage's input, until they are sent or a stage of the same rank takes them
    input_gradients: dict[StageMicrobatch, list[Tensor]] = field(default_factory=dict)
    wgrad_tasks: dict[StageMicrobatch, WgradTasks] = field(default_factory=dict)
    loss_sums: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    in_flight: int = 0
    peak_in_flight: int = 0


class Executor:
    """The executor of one rank's actions, from checked schedules that place the stages alike.

    Args:
        stages: the stages of this rank.
        rank_of: stage -> index of the rank that has it.
        transport: the transfers to other ranks; None when there is one rank.
        parallel: the `ModelParallel` of the model's layers.
        observers: called during a step; the list may change between steps.
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

        The loss of a microbatch is backpropagated as a sum over its tokens. No rank knows the number of valid tokens of
        the global batch before the end of the step, so gradients are sums here, and are divided once when they have
        been reduced. No other place decides how a loss is scaled.

        Args:
            actions: the actions of this rank, in order.
            batches: the microbatches, the same on all ranks of a model.
            step_id: identifies the step, the same on all ranks of a model; two ranks that disagree get an error.
            loss_scale: the factor of the losses that are backpropagated, a scalar, or None for 1. The returned sums
                are not scaled.

        Raises:
            ValueError: a stage returns a value that cannot be passed to the next.
        """
        transport, state = self.transport, _State(batches, loss_scale)
        if transport is not None:
            transport.step_id, state.signatures = step_id, [batch_signature(batch) for batch in batches]
        # stage -> index of the action that completes its gradients
        last_backwards = {action.stage: index for index, action in enumerate(actions) if action.kind in LAST_USE}
        early = _receives_after(actions) if transport is not None and transport.links.takes_early else {}
        for index, action in enumerate(actions):
            began = time.perf_counter() if self.observers else 0.0
            for receive in early.get(index, ()):
                if not transport.post_receive(receive, state.signatures[receive.microbatch], early=True):  # type: ignore[union-attr]
                    break
            if is_last := last_backwards.get(action.stage) == index:
                self.stages.before_last_backward(action.stage)
            self._do(action, state)
            if is_last:
                self.stages.after_last_backward(action.stage)
            for observer in self.observers:
                observer.after_action(action, began, time.perf_counter())
        if transport is not None:
            transport.flush()
        zero = torch.zeros((), dtype=torch.float64, device=self.parallel.context.device)
        return StepTotals(_total(state.loss_sums, zero), _total(state.counts, zero), state.peak_in_flight)

    @timed(lambda executor, action, _: region_of(action, over_replicas(executor.parallel.context)))
    def _do(self, action: Action, state: _State) -> None:
        kind, key = action.kind, (action.stage, action.microbatch)
        if kind == "forward":
            self._forward(key, state)
        elif kind in COMPUTE:
            self.stages.before_backward(*key, kind)
            if kind == "backward":
                with self.stages.full_backward():
                    self._backward(key, state)
            elif kind == "backward_input":  # the tasks keep what `backward_weight` needs
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
                self.transport.send_value(action, spec, tensors, state.signatures[action.microbatch])
            elif kind == "send_gradient":
                self.transport.send(action, state.input_gradients.pop(key))
            else:
                self.transport.post_receive(action, state.signatures[action.microbatch])

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
                        f"computed under no_grad, or are all parameters frozen? Where no label counts, return a zero "
                        f"that depends on the outputs, outputs.sum() * 0.0, and a count of 0"
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
                    f"stage {stage} returned {spec}, in which nothing requires a gradient: the parameters of this "
                    f"stage and of those before it would never change. Does a block detach its output, or return "
                    f"integers only?"
                )
            state.edges[key] = edges
        # detached from its graph: an output that backward does not need is freed as soon as it is sent
        state.outputs[key] = spec, [tensor.detach() for tensor in tensors]

    def _backward(self, key: StageMicrobatch, state: _State) -> None:
        stage, microbatch = key
        if stage == self.last_stage:
            # None is 1.0 to autograd; for a tensor it would import sympy, which takes 0.5 s on each rank
            seed = None if state.loss_scale is None else state.loss_scale.to(state.loss_sums[-1].dtype)
            output_gradients: list[Tensor | None] = [seed]
        elif self.rank_of[stage + 1] == self.rank_of[stage]:
            output_gradients = list(state.input_gradients.pop((stage + 1, microbatch)))
        else:
            assert self.transport is not None
            output_gradients = list(self.transport.wait_gradient(stage, microbatch))
        edges = state.edges.pop(key)
        if edges:  # for tensors, backward would turn off torch function modes, which a recomputed forward needs
            torch.autograd.backward(edges, output_gradients)
        if stage:
            roots = state.roots.pop(key)  # an unused root has no gradient: zeros are sent
            grads = [root.grad if root.grad is not None else torch.zeros_like(root) for root in roots]
            state.input_gradients[key] = grads


def forward_only(actions: Sequence[Action], microbatches: int) -> list[Action]:
    """Return the actions of a rank's list that an evaluation of ``microbatches`` microbatches needs.

    All ranks keep the order of the full lists, so this part of a schedule without deadlock has none either.
    """
    kinds = ("forward", "send_activation", "receive_activation")
    return [action for action in actions if action.kind in kinds and action.microbatch < microbatches]


def _receives_after(actions: Sequence[Action]) -> dict[int, list[Action]]:
    """Return for each compute action, by index, the receives that follow it: posted early, they overlap with it."""
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
