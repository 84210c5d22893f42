"""The stages of a model on this rank as the executor calls them: model, loss, random state, and gradient reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

from torch import nn
from torch.utils._pytree import tree_map_only

from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.strategy import BackwardKind, Strategy
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.engine.eval_metrics import EvalMetrics
from colossus.engine.forward_rng import ForwardRng
from colossus.engine.input_writes import refuse_writes
from colossus.engine.inputs import Inputs, model_input
from colossus.engine.loss_function import LossFunction, checked_sum
from colossus.layers.deferred_wgrad import DeferredWgrad
from colossus.layout.split_parameter import as_shards
from colossus.schedule.actions import Action
from colossus.schedule.runtime.executor import WgradTasks
from colossus.schedule.runtime.observer import StepObserver
from colossus.schedule.runtime.stage_scope import MUST_NAME_ALL, MetaTensorGuard
from colossus.sharded_tensor.regions import without_sequence
from colossus.sharded_tensor.tensor import ShardedTensor


class ModelStages:
    """Implements `colossus.schedule.runtime.executor.Stages`.

    Args:
        model: of this rank.
        forwards: stage -> what runs it, for the stages of this rank.
        last_stage: number of the last stage of the model.
        inputs: from a microbatch of a data rank to this rank's shard of it.
        loss_fn: (output of the last stage, local batch) -> (loss sum, count).
        metrics: what evaluations sum beside the loss.
        parameters_by_stage: the parameters whose gradients are complete with each stage of this rank.
        splits_backward: whether the schedule splits backwards.
        is_partitioned: whether the model is cut into stages.
        observers: called around forwards; the list may change between steps.

    Attributes:
        step: of the random streams; None in an evaluation.
    """

    def __init__(
        self,
        context: ParallelContext,
        model: nn.Module,
        forwards: Mapping[int, Callable[[Any], Any]],
        last_stage: int,
        *,
        inputs: Inputs,
        loss_fn: LossFunction,
        metrics: EvalMetrics,
        store: ParameterStore,
        strategy: Strategy,
        parameters_by_stage: Mapping[int, Sequence[nn.Parameter]],
        splits_backward: bool,
        is_partitioned: bool,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        self._context, self._forwards, self._last_stage = context, forwards, last_stage
        self._inputs, self.loss_fn, self.metrics = inputs, loss_fn, metrics
        self._store, self._strategy, self._weights = store, strategy, store.weights
        self._parameters, self._is_partitioned = parameters_by_stage, is_partitioned
        self._rng, self._autocast = ForwardRng(context), context.precision.autocast(context.device)
        self._model = model
        self._ids = {stage: {id(param) for param in params} for stage, params in parameters_by_stage.items()}
        #: stages that have not run yet: the guard is slow, and what a stage uses does not change
        self._to_guard = set(forwards) if is_partitioned else set()
        self._wgrad_mode: AbstractContextManager[Any] = (
            DeferredWgrad(store.weights) if splits_backward else nullcontext()
        )
        self.step: int | None = None
        self._observers = observers

    def forward(self, stage: int, microbatch: int, value: Any, batch: Any) -> Any:
        if self.step is not None:
            self._context.rng.move_to(self.step, microbatch)
        with self._context, self._wgrad_mode:
            own = self._inputs.local(batch) if stage in (0, self._last_stage) else None
            watch: AbstractContextManager[None] = nullcontext()
            if stage == 0:
                value = model_input(own)
                if self._is_partitioned:
                    watch = refuse_writes(value, self._model, names_writer=stage in self._to_guard)
                value = self._inputs.mark_tokens(value, batch)
            for observer in self._observers:
                samples = self._inputs.local_samples(batch) if observer.needs_samples else None
                observer.before_forward(stage, microbatch, samples)
            self._store.begin_action()
            self._store.gather_lasting()
            rng = self._rng.at(stage, microbatch, training=self.step is not None)
            with self._autocast, rng, MetaTensorGuard(stage) if stage in self._to_guard else nullcontext():
                try:
                    with watch:
                        out = self._forwards[stage](value)
                    for observer in self._observers:
                        observer.after_forward(stage, microbatch, out)
                    if stage == self._last_stage:
                        outputs = tree_map_only(ShardedTensor, without_sequence, out)
                        out = checked_sum(self.loss_fn(outputs, own))
                        if self.step is None:
                            self.metrics.add(outputs, own)
                except AttributeError as error:
                    if self._is_partitioned:
                        error.add_note(
                            f"If it is an attribute of a module: it may be on another stage. {MUST_NAME_ALL}"
                        )
                    raise
            self._to_guard.discard(stage)
            return out

    def is_trained(self, stage: int) -> bool:
        return any(param.requires_grad for param in self._parameters[stage])

    def before_backward(self, stage: int, microbatch: int, kind: str) -> None:
        if kind != "backward_weight":  # the half that recomputes nothing
            self._context.rng.return_to(microbatch)
        self._store.begin_action()

    def after_backward(self, stage: int, microbatch: int, kind: str) -> None:
        self._store.after_backward()
        self._strategy.after_backward(stage, microbatch, cast(BackwardKind, kind))

    def full_backward(self) -> AbstractContextManager[None]:
        return self._wgrad_mode

    @contextmanager
    def deferred_wgrad(self) -> Iterator[WgradTasks]:
        with self._wgrad_mode, self._weights.deferral.deferred() as tasks:
            yield tasks

    def run_wgrad(self, tasks: WgradTasks) -> None:
        with as_shards():
            self._weights.deferral.run(tasks)

    def before_last_backward(self, stage: int) -> None:
        self._weights.set_last_microbatch()
        with as_shards():
            self._strategy.last_backward(stage)

    def after_last_backward(self, stage: int) -> None:
        self._weights.set_last_microbatch(False)

    def reduce(self, stage: int) -> None:
        with as_shards():
            self._weights.flush(self._ids[stage])
            self._strategy.reduce(stage)


def parameters_by_stage(
    actions: Sequence[Action], parameters_on: Callable[[int], Sequence[nn.Parameter]]
) -> dict[int, list[nn.Parameter]]:
    """Stage -> the parameters whose gradients are complete with it, in the order of a rank's reductions.

    Parameters that several stages of the rank share come with the last of these.
    """
    order = [action.stage for action in actions if action.kind == "reduce"]
    taken: set[int] = set()
    found: dict[int, list[nn.Parameter]] = {}
    for stage in reversed(order):
        found[stage] = [param for param in parameters_on(stage) if id(param) not in taken]
        taken |= {id(param) for param in found[stage]}
    return {stage: found[stage] for stage in order}
