"""The engine: a model, its optimizer and its data under one parallel context, one train step at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from colossus.comm import collectives, step_regions
from colossus.data.batch import Microbatches, batch_size_of
from colossus.data.loader import Loader, Loaders
from colossus.engine.checkpoints import Checkpoints
from colossus.engine.data_check import DataCheck
from colossus.engine.deterministic import add_switch
from colossus.engine.evaluation import Evaluation
from colossus.engine.inputs import Inputs, StepBatch
from colossus.engine.optimizer_step import OptimizerStep
from colossus.engine.reference_weights import take_reference
from colossus.engine.results import EvalResult, StepResult, addend, signal_of
from colossus.engine.stages import ModelStages
from colossus.error_place import add_place
from colossus.layers.model_parallel import model_parallel_of
from colossus.layout.split_parameter import as_shards
from colossus.schedule.actions import Action
from colossus.schedule.executor import Executor, StepTotals
from colossus.schedule.pipeline import PipelineRuntime
from colossus.state.run import Run


class Engine:
    """The result of `colossus.initialize`.

    Attributes:
        model: this rank's shards; call it as any module, unless a pipeline has split it into stages.
        loader: training batches of this data rank, without end.
        eval_loader: validation batches, or None.
        context: ranks, axes, groups.
        strategy: owner of the data axis: what replicas exchange, and when.
        store: the parameters, as they are stored and as compute sees them.
        inputs: converts a batch to the input of the model.
        pipeline: schedule and partition.
        executor: runs the stages of this rank.
        observers: called inside of a step; append your own.
        num_parameters: elements of the whole model, a tied parameter counted once.
        group_rules: a line for each pattern of ``optimizer.groups``: the parameters that it matches.
        loss_scaler: loss scale of fp16, else None.
        run: the parts with a state, the progress, and the run folder.
        checkpoints: saves and loads all of this.
    """

    def __init__(
        self,
        run: Run,
        optimizer_step: OptimizerStep,
        pipeline: PipelineRuntime,
        stages: ModelStages,
        executor: Executor,
        inputs: Inputs,
        num_parameters: int,
        closing: ExitStack,
        group_rules: Sequence[str] = (),
    ) -> None:
        self.run, self.config, self.context, self.device = run, run.config, run.context, run.context.device
        self.model, self.optimizer, self.store, self.strategy = run.model, run.optimizer, run.store, run.strategy
        self.pipeline, self.executor, self.inputs, self.num_parameters = pipeline, executor, inputs, num_parameters
        self.group_rules = group_rules
        self.observers, self.loss_scaler = stages.observers, optimizer_step.loss_scaler
        self._stages, self._optimizer_step = stages, optimizer_step
        #: callbacks that undo what was made with the engine
        self._closing = closing
        #: why no step or evaluation may begin any more
        self._ended: str | None = None
        #: steps, and forwards of evaluations, so far
        self._num_runs = 0
        self._sizes = run.config.train.batch_sizes
        self._parallel = model_parallel_of(run.context)
        run.engine = self
        self.checkpoints = Checkpoints(run)
        self._data_check = DataCheck(run)
        self._evaluation = Evaluation(
            run.model, stages.metrics.names, run.context, run.strategy, stages.buffers, self._forward
        )

    @property
    def completed_steps(self) -> int:
        """Optimizer steps done."""
        return self.run.completed_steps

    @property
    def loaders(self) -> Loaders | None:
        """Loaders of training and validation; may be replaced between steps."""
        return self.run.loaders

    @loaders.setter
    def loaders(self, loaders: Loaders | None) -> None:
        self.run.loaders = loaders

    @property
    def loader(self) -> Any:
        if self.loaders is None:
            raise ValueError("this engine has no data: the config has no `data`, and none was passed to initialize")
        return self.loaders.train

    @property
    def eval_loader(self) -> Any:
        return self.loaders.validation if self.loaders is not None else None

    # -- training -----------------------------------------------------------------------------------------

    def train_step(self, batch: Any) -> StepResult:
        """Run one optimizer step on this data rank's share of the global batch.

        Args:
            batch: a nest of tensors, dim 0 the samples; every rank of a model passes the same one. It is split into
                ``schedule.microbatches`` along dim 0 (fewer while ``train.batch_ramp`` grows), and each of these over
                the tensor axes that split a batch. Or `colossus.data.Microbatches`, as many on all ranks.

        Returns:
            Loss and gradient norm of the global batch, the same on all ranks.

        Raises:
            ValueError: if the batch does not divide or does not have the ramp's size, ranks that share a batch have
                different ones, the loss function does not return (sum, count), or gradients are turned off.
            NonFiniteGradients: on all ranks, see ``train.on_nonfinite``: the step is complete.
            ValueError: on all ranks, before the first step, if data ranks read different data.
            ReplicasDiffer, LossSpike: on all ranks, see ``train.check_replicas_every`` and ``train.on_spike``.
        """
        step_regions.batch_is_here()
        if not torch.is_grad_enabled():
            mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
            raise ValueError(
                f"train_step was called under torch.{mode}, which turns gradients off: call it outside of it"
            )
        if self.strategy.is_averaged:
            raise RuntimeError(
                "no step can be trained inside of averaged(), strategy.evaluation() or export(), where parameters are "
                "an average: leave that block first"
            )
        batch = self.inputs.dims.first(batch)
        has_budget = isinstance(batch, Microbatches)
        if not has_budget and (prepare := getattr(self.model, "training_batch", None)) is not None:
            batch = prepare(batch)
        if not has_budget and (self.config.train.batch_ramp is not None or self.config.train.samples_interact):
            self._require_size(batch)
        step_batch = self.inputs.split(batch, self.pipeline.microbatches_at(self.completed_steps))
        self._begin_run()
        self._data_check.before_step()
        check, mark = self._optimizer_step.batch_check, None
        if check.num_sharing > 1:
            mark = check.mark(batch, step_batch.fingerprint)  # before the model writes to it
        try:
            totals = self.accumulate_gradients(step_batch)
            result = self._optimizer_step.run(self.completed_steps, totals, self.run.stop, mark, self.observers)
        finally:
            if self.loaders is not None and isinstance(self.loaders.train, Loader):
                self.loaders.train.num_untrained = 0
        self.run.completed_steps = result.step
        with self._ends_on_failure():
            self._optimizer_step.check_result(result)
        self._optimizer_step.watch.raise_failure()
        return result

    def accumulate_gradients(self, batch: StepBatch) -> StepTotals:
        """Run forward and backward of a step, and sum its gradients, without division and clipping.

        Under fp16 they are gradients of the scaled loss (`LossScaler.factor`).
        """
        if not self.model.training:  # checked first, so that a submodule that a user has set to eval mode stays there
            self.model.train()
        self._stages.step = self.completed_steps
        with self._ends_on_failure():
            factor = self.loss_scaler.begin_step(batch.whole) if self.loss_scaler is not None else None
            self.strategy.loss_scale = factor
            with as_shards():
                self.optimizer.zero_grad(set_to_none=True)
                self.store.begin_step()
                with step_regions.region("strategy begin_step", step_regions.over_replicas(self.context)):
                    self.strategy.begin_step(self.completed_steps)
                self._optimizer_step.routers.begin_step()
            self._stages.buffers.begin()
            totals = self._run(self.pipeline.actions_of(len(batch.microbatches)), batch, factor)
            self._stages.buffers.end_step()
            with as_shards():
                self.store.end_step()
            self._stages.finish()
        return totals

    def _require_size(self, batch: Any) -> None:
        data, samples = self.context.size("data"), self._sizes.at(self.completed_steps)
        if (size := batch_size_of(batch)) * data != samples:
            key = "batch_ramp" if self.config.train.batch_ramp is not None else "samples_interact"
            raise ValueError(
                f"train.{key}: step {self.completed_steps + 1} takes {samples} samples = data {data} x "
                f"{samples // data}, but this data rank's batch has {size}: take batches from engine.loader"
            )

    def lr_at(self, step: int) -> float:
        """Return the learning rate of step ``step``, counted from 0: a linear warm-up, then the schedule's shape."""
        return self._optimizer_step.learning_rate.at(step)

    def _begin_run(self) -> None:
        """Count a step, or the forward of an evaluation's batch, on all ranks alike, also on one without samples."""
        if self._ended is not None:
            raise RuntimeError(self._ended)
        self.checkpoints.take_weights()
        take_reference(self.run, self.checkpoints.resumer)
        self._num_runs += 1

    @contextmanager
    def _ends_on_failure(self) -> Iterator[None]:
        """Refuse further runs if the block raises, since the state of other ranks is unknown then."""
        try:
            yield
        except BaseException:
            self.strategy.abandon()
            self._ended = self._ended or (
                "an earlier step or evaluation failed on this rank, and other ranks may wait for it: close this engine "
                "and make a new one; with checkpoint.resume it resumes from the newest checkpoint"
            )
            raise

    def _run(self, actions: Sequence[Action], batch: StepBatch, loss_scale: Tensor | None = None) -> StepTotals:
        """Run the stages of this rank."""
        torch.clear_autocast_cache()  # an autocast block around several steps would use casts of old weights
        step_id = (self._num_runs, batch.fingerprint) if self.pipeline.partition is not None else None
        try:
            self._stages.infos = batch.infos
            if loss_scale is not None:
                self._stages.infos = [replace(info, loss_scale=loss_scale) for info in batch.infos]
            with self._parallel.batch(self._stages.infos[0]):  # each forward and backward sets its own
                return self.executor.run(actions, batch.microbatches, step_id, loss_scale)
        except BaseException as error:
            add_place(error)
            add_switch(error)
            raise

    # -- evaluation ---------------------------------------------------------------------------------------

    def eval_step(self, batch: Any) -> EvalResult:
        """Return the loss of one batch without a step, summed over the data ranks; the model's mode stays.

        Args:
            batch: as for `train_step`, of any size, which may differ between data ranks; one without samples counts 0.
        """
        with self._ends_on_failure():
            return self._evaluation.one_batch(batch)

    @step_regions.in_region("evaluation", step_regions.REST)
    def evaluate(self) -> EvalResult:
        """Return the mean loss over at most ``train.eval_batches`` validation batches, and the ``eval_metrics``.

        Raises:
            ValueError: without validation data.
        """
        if self.eval_loader is None:
            raise ValueError("there is no validation data to evaluate on")
        with self._ends_on_failure():
            result, stops = self._evaluation.all_batches(
                self.eval_loader, self.config.train.eval_batches, lambda: self.run.stop
            )
            self._data_check.after_evaluation()
        return replace(result, step=self.completed_steps, complete=not stops, stop_signal=signal_of(stops))

    def _forward(self, batch: Any) -> Tensor:
        """Return this rank's sums over a batch of any size, see `Evaluation`."""
        spread = self._optimizer_step.routers.data_group  # ranks that wait for each other in each forward
        most = self.pipeline.num_microbatches if self.pipeline.last_stage and spread.size == 1 else 1
        self._stages.step = None
        self._begin_run()
        metrics = self._stages.metrics
        sums = torch.zeros(1 + len(metrics.names), 2, dtype=torch.float64, device=self.device)
        try:
            interact, batch = self._parallel.samples_interact, self.inputs.dims.first(batch)
            if isinstance(batch, Microbatches):
                batches = [(self.inputs.split(batch, len(batch.batches)), 1.0)]
            else:
                batches = self.inputs.in_one(batch) if interact else [*self.inputs.split_evenly(batch, most)]
            if spread.size > 1:
                count = torch.tensor(len(batches), device=self.device)
                missing = int(collectives.all_reduce(count, spread, op="max").wait()) - len(batches)
                batches += [(self.inputs.stand_in(batch), math.inf)] * missing
            self.store.begin_evaluation(sum(len(step_batch.microbatches) for step_batch, _ in batches))
            with self.strategy.forwards():
                for step_batch, times in batches:
                    totals = self._run(self.pipeline.forward_actions(len(step_batch.microbatches)), step_batch)
                    loss = torch.stack((totals.loss_sum, totals.tokens))
                    sums += torch.cat((loss[None], metrics.take())) / times
        finally:
            self.store.release()
        return sums

    # -- life ---------------------------------------------------------------------------------------------

    def request_stop(self, signum: int | None = None) -> None:
        """Request a stop after the next step. That step's all-reduce sums the requests, so that all ranks agree.

        Args:
            signum: number of the signal that is the reason; all ranks receive it (`StepResult.stop_signal`).
        """
        self.run.stop = addend(signum)

    def withdraw_stop(self) -> None:
        """Withdraw a request of this rank, since what it should have stopped has ended."""
        self.run.stop = 0.0

    def close(self) -> None:
        """Wait for a save under way, and undo what the engine has made.

        That is hooks on its parameters, loader workers, links between ranks, and process groups. Replicas of an
        asynchronous strategy are waited for, too, unless something has failed.
        """
        self._ended = "this engine is closed; make a new one"
        self.checkpoints.close()
        self.strategy.close()
        self._closing.close()
