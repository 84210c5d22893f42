"""The stages of a model on this rank: how the executor runs them, and the random numbers of a forward."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch import Tensor, nn

from colossus.comm.step_regions import over_replicas, region
from colossus.context.parallel_context import ParallelContext
from colossus.data.model_input import model_input
from colossus.data_parallel.strategy import BackwardKind, Strategy
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.engine.forward_buffers import ForwardBuffers
from colossus.engine.inputs import ForwardCall, Inputs
from colossus.engine.loss_function import EvalMetrics, LossFunction, checked_sum, shared_sum
from colossus.engine.loss_parameters import FirstLoss
from colossus.gradients.order_free import OrderFreeGradients, shared_parameters
from colossus.layers.deferred_wgrad import DeferredWgrad
from colossus.layers.model_parallel import BatchInfo, model_parallel_of
from colossus.layout.split_parameter import as_shards
from colossus.nest import tensors
from colossus.random import GlobalRng, hash_key
from colossus.schedule.executor import StepObserver, WgradTasks
from colossus.schedule.partition import MUST_NAME_ALL, MetaTensorGuard
from colossus.schedule.pipeline import PipelineRuntime


class ModelStages:
    """The implementation of `colossus.schedule.executor.Stages`.

    Args:
        context: the rank's context.
        model: the rank's part of the model.
        pipeline: schedule and partition.
        store: the parameters.
        strategy: the data-parallel strategy.
        inputs: converts a data rank's microbatch to this rank's shard of it.
        loss_fn: (output of the last stage, local batch) -> (loss sum, count).
        buffers: buffers of the model that forwards change.

    Attributes:
        observers: called around forwards; the list may change between steps.
        metrics: sums of evaluations beside the loss.
        step: step of the random streams; None in an evaluation.
        infos: facts about each microbatch of the step or evaluation.
        gradients: the sums of gradients under ``train.reproducible``, else None: a strategy sums them as they are made.
    """

    def __init__(
        self,
        context: ParallelContext,
        model: nn.Module,
        pipeline: PipelineRuntime,
        store: ParameterStore,
        strategy: Strategy,
        inputs: Inputs,
        loss_fn: LossFunction,
        buffers: ForwardBuffers,
    ) -> None:
        self._context, self._last_stage = context, pipeline.last_stage
        self._parallel = model_parallel_of(context)
        self._forwards = pipeline.stage_forwards(model)
        self._first = ForwardCall(model, is_partitioned=pipeline.partition is not None)
        self._inputs, self.loss_fn, self.buffers = inputs, loss_fn, buffers
        self._first_loss = FirstLoss(
            context, model, is_partitioned=pipeline.partition is not None, num_microbatches=pipeline.most_microbatches
        )
        #: modes (whether in training) in which no loss was checked yet
        self._new_losses = {True, False}
        self.metrics = EvalMetrics(model, context.device)
        self._store, self._strategy, self._weights = store, strategy, store.weights
        self._parameters, self._is_partitioned = strategy.parts.parameters_by_stage, pipeline.partition is not None
        self._rng, self._autocast = ForwardRng(context), context.precision.autocast(context.device)
        self._ids = {stage: {id(param) for param in params} for stage, params in self._parameters.items()}
        #: stages that have not run yet: the guard is slow, and what a stage uses does not change
        self._to_guard = set(self._forwards) if self._is_partitioned else set()
        self._wgrad_mode: AbstractContextManager[Any] = (
            DeferredWgrad(store.weights) if pipeline.splits_backward else nullcontext()
        )
        self.step: int | None = None
        self.infos: Sequence[BatchInfo] = ()
        self.observers: list[StepObserver] = []
        self.gradients: OrderFreeGradients | None = None
        if context.options.reproducible:
            if strategy.tables is not None:
                raise ValueError(
                    "train.reproducible = 'plan' does not support tables with sparse gradients, whose rows are summed "
                    "in the order of the ranks: leave sparse=True out"
                )
            parts = strategy.parts
            shared = shared_parameters(model, parts, store.stored)
            self.gradients = self._weights.addends = OrderFreeGradients(parts, shared)

    def forward(self, stage: int, microbatch: int, value: Any, batch: Any) -> Any:
        self._parallel.batch_info = self.infos[microbatch]
        if self.step is not None:
            self._context.rng.move_to(self.step, microbatch)
            self.buffers.sync()
        with self._context, self._wgrad_mode:
            own = self._inputs.local(batch) if stage in (0, self._last_stage) else None
            versions: list[tuple[str, Tensor, int]] = []
            if stage == 0:
                value = model_input(own)
                if stage in self._to_guard:
                    versions = [(path, x, x._version) for path, x in tensors(value) if not x.is_inference()]
                value = self._inputs.mark_tokens(value, batch)
            for observer in self.observers:
                samples = self._inputs.local_samples(batch) if observer.needs_samples else None
                observer.before_forward(stage, microbatch, samples)
            self._store.begin_action()
            self._store.gather_lasting()
            # stages that repeat the random numbers of earlier ones use one stream
            stream = 0 if getattr(self._forwards[stage], "draws_as_whole", False) else stage
            rng = self._rng.forward(stage, microbatch, stream, training=self.step is not None)
            with self._autocast, rng, MetaTensorGuard(stage) if stage in self._to_guard else nullcontext():
                try:
                    forward = self._forwards[stage]
                    out = self._first(forward, value, own) if stage == 0 else forward(value)
                    _refuse_writes(versions)
                    for observer in self.observers:
                        observer.after_forward(stage, microbatch, out)
                    if stage == self._last_stage:
                        loss_batch, ways = self._inputs.for_loss(out, own, batch)
                        outputs, in_training = out, self.step is not None
                        if in_training in self._new_losses:
                            out = self._first_loss.call(self.loss_fn, outputs, loss_batch)
                            self._new_losses.discard(in_training)
                        else:
                            out = checked_sum(self.loss_fn(outputs, loss_batch))
                        out = shared_sum(*out, ways)
                        if not in_training:
                            self.metrics.add(outputs, loss_batch, ways)
                except AttributeError as error:
                    if self._is_partitioned:
                        error.add_note(f"An attribute of a module may be on another stage. {MUST_NAME_ALL}")
                    raise
            self._to_guard.discard(stage)
            return out

    def is_trained(self, stage: int) -> bool:
        return any(param.requires_grad for param in self._parameters[stage])

    def before_backward(self, stage: int, microbatch: int, kind: str) -> None:
        if kind != "backward_weight":  # that half recomputes nothing
            self._context.rng.return_to(microbatch)
            self._parallel.batch_info = self.infos[microbatch]
        self._store.begin_action()

    def after_backward(self, stage: int, microbatch: int, kind: str) -> None:
        self._store.after_backward()
        self._strategy.after_backward(stage, microbatch, cast(BackwardKind, kind))
        if self.gradients is not None:
            with as_shards():
                self.gradients.take()

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
        if self.gradients is None:
            with as_shards():
                self._strategy.last_backward(stage)

    def after_last_backward(self, stage: int) -> None:
        self._weights.set_last_microbatch(False)

    def reduce(self, stage: int) -> None:
        with as_shards():
            self._weights.flush(self._ids[stage])
            if self.gradients is None:
                self._strategy.reduce(stage)

    def finish(self) -> None:
        """Wait until the gradients that the optimizer will see are complete."""
        with as_shards():
            if self.gradients is not None:
                self.gradients.take()
                self.gradients.finish()
                for stage in self._parameters:
                    self._strategy.last_backward(stage)
                    self._strategy.reduce(stage)
            with region("strategy finish", over_replicas(self._strategy.parts.context)):
                self._strategy.finish()


class ForwardRng:
    """The seeds of the global generators in a forward, by its position in the run; they are restored after it.

    So the random numbers of a forward do not depend on earlier ones. Torch's generators are for samples and tokens:
    ranks with the same ones draw the same numbers, other ranks draw others. Python's ``random`` and numpy's legacy
    generator are for the program (for example which layers to skip): all ranks draw the same, as one process does.
    """

    def __init__(self, context: ParallelContext) -> None:
        self._context = context
        self._torch = GlobalRng(tuple({torch.device("cpu"), context.device}), torch_only=True)
        self._numpy = np.random.MT19937(0)
        self._parallel = model_parallel_of(context)
        shard = self._parallel.regions.whole.batch
        self._shard_index = context.index(shard), context.index("sequence")
        #: number of evaluation forwards of each stage since the last training step
        self._evaluations: dict[int, int] = {}

    @contextmanager
    def forward(self, stage: int, microbatch: int, stream: int, *, training: bool) -> Iterator[None]:
        """Seed the generators for a forward of a stage at the current step, with a stream of the microbatch."""
        shard_index: tuple[int, ...] = self._shard_index
        if training:
            self._evaluations.clear()
            position: tuple[object, ...] = self._context.rng.step, microbatch, stream
            if self._context.options.reproducible:  # by its sample, which is the microbatch
                sample = self._parallel.batch_info.first_sample + microbatch
                shard_index, position = (), (self._context.rng.step, sample, stream)
        else:
            count = self._evaluations[stage] = self._evaluations.get(stage, 0) + 1
            position = "evaluation", self._context.rng.step, count, stream
        seed = self._context.rng.seed
        torch_state, python_state, numpy_generator = self._torch.get_state(), random.getstate(), get_bit_generator()
        self._torch.seed(hash_key(seed, "torch", *shard_index, *position))
        program_seed = hash_key(seed, "python", *position)
        random.seed(program_seed)
        # the generator is swapped, since copying its state takes longer than all other work here
        set_bit_generator(self._numpy)
        np.random.seed(program_seed % 2**32)
        try:
            yield
        finally:
            self._torch.set_state(torch_state)
            random.setstate(python_state)
            set_bit_generator(numpy_generator)


def _refuse_writes(versions: Sequence[tuple[str, Tensor, int]]) -> None:
    """Raise ValueError if the first forward of a pipeline has written to the batch: the last stage has the old one."""
    for path, x, version in versions:
        if x._version != version:
            raise ValueError(
                f"the model writes to its input in place (inputs{path}, {list(x.shape)}): under a pipeline the loss "
                f"would read the batch as it was. Write to a copy: x = x - mean instead of x -= mean, or x.clone()"
            )
