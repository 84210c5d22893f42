"""The engine: a model, its optimizer and its data under one parallel context, one train step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colossus.comm import log
from colossus.config import Config
from colossus.context.parallel_context import ParallelContext
from colossus.data.loader import Loaders
from colossus.engine.evaluation import Evaluation
from colossus.engine.failed_step import agree_on_failure
from colossus.engine.gradients.gradient_norm import GradientNorm
from colossus.engine.gradients.tied import TiedGradients
from colossus.engine.inputs import Inputs, StepBatch
from colossus.engine.loss_function import LossFunction
from colossus.engine.optimizers import keep_lr_scales
from colossus.engine.pipeline import PipelineRuntime
from colossus.engine.reduction import StepReduction
from colossus.engine.results import EvalResult, EvalSummary, StepResult
from colossus.engine.stages import ModelStages, parameters_by_stage
from colossus.layers.model_parallel import model_parallel_of
from colossus.registry import LR_SCHEDULES, STRATEGIES
from colossus.schedule.actions import Action
from colossus.schedule.runtime.executor import StepTotals


class Engine:
    """What `colossus.initialize` returns.

    Attributes:
        model: this rank's shards; call it as any module, unless a pipeline has cut it into stages.
        loader: training batches of this data rank, without end.
        eval_loader: validation batches, or None.
        context: ranks, axes, groups.
        inputs: how a batch enters the model.
        pipeline: schedule and partition.
        strategy: sums gradients over the ranks.
        stages, executor: the stages of this rank, and what runs them; both can be watched.
        completed_steps: optimizer steps done.
    """

    def __init__(
        self,
        config: Config,
        context: ParallelContext,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer,
        pipeline: PipelineRuntime,
        inputs: Inputs,
        loaders: Loaders | None,
    ) -> None:
        self.config, self.context, self.model, self.loss_fn = config, context, model, loss_fn
        self.optimizer, self.pipeline, self.inputs, self.loaders = optimizer, pipeline, inputs, loaders
        self.device = context.device
        self.completed_steps = 0
        #: where the launcher keeps what this run writes; None outside of a launch
        self.run_dir: Path | None = None
        self._stop = self._broken = self._closed = False
        #: number of the run (step or evaluation) that failed last, until the ranks have agreed that it did
        self._failed_run: int | None = None
        self._num_runs = self._num_groups = 0
        #: collectives up to the last evaluation, in which data ranks may have had unequal numbers of samples
        self._counts_of_evaluations: dict[str, int] = {}
        self._keep_lr_scales()
        shape = config.lr_schedule.type
        self._lr_shape = shape if callable(shape) else LR_SCHEDULES.get(shape)
        self._parallel = model_parallel_of(context)
        self._weights = self._parallel.weights
        stage_parameters = parameters_by_stage(pipeline.actions, lambda stage: pipeline.parameters_on(stage, model))
        self.strategy = STRATEGIES.build(
            config.parallel.strategy.spec(),
            model=model,
            context=context,
            bucket_mb=config.comm.bucket_mb,
            parameters_by_stage=stage_parameters,
        )
        self._tied = TiedGradients(pipeline.tied_parameters(model), context)
        norm = GradientNorm(model.parameters(), context, self._tied.counted_elsewhere)
        self._reduction = StepReduction(context, norm, config.train.clip_grad_norm)
        self.stages = ModelStages(
            context,
            pipeline.stage_forwards(model),
            pipeline.last_stage,
            inputs=inputs,
            loss_fn=lambda outputs, batch: self.loss_fn(outputs, batch),
            weights=self._weights,
            strategy=self.strategy,
            parameters_by_stage=stage_parameters,
            splits_backward=pipeline.splits_backward,
            is_partitioned=pipeline.partition is not None,
        )
        self.executor = pipeline.make_executor(self.stages, self._parallel)
        self._evaluation = Evaluation(model, context, self._forward, self._mark_failed, self._reduction)

    # -- data ---------------------------------------------------------------------------------------------

    @property
    def loader(self) -> Any:
        if self.loaders is None:
            raise ValueError("this engine has no data: the config has no `data`, and none was given to initialize")
        return self.loaders.train

    @property
    def eval_loader(self) -> Any:
        return self.loaders.validation if self.loaders is not None else None

    # -- training -----------------------------------------------------------------------------------------

    def train_step(self, batch: Any) -> StepResult:
        """One optimizer step on this data rank's share of the global batch.

        Args:
            batch: a nest of tensors, dim 0 the samples; every rank of a model passes the same one. Split into
                ``schedule.microbatches`` along dim 0, and each of these over the tensor axes that split a batch.

        Returns:
            Loss and gradient norm of the global batch, the same on all ranks.

        Raises:
            ValueError: when the batch does not divide, ranks that share a batch were given different ones, the loss
                function does not return (sum, count), or gradients are turned off.
        """
        if not torch.is_grad_enabled():
            mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
            raise ValueError(
                f"train_step was called under torch.{mode}, where nothing gets a gradient: call it outside of that "
                f"block; for a loss without a step there is eval_step"
            )
        step_batch = self.inputs.split(batch, self.config.schedule.microbatches)
        self._begin_run()
        check = self._reduction.batch_check
        check.is_silent = bool(self.stages.observers)
        # before the model can write to the batch
        mark = check.mark(batch, step_batch.fingerprint) if check.is_needed else None
        if not self.model.training:  # asked first: a submodule that a user has put into eval mode stays there
            self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        self._weights.begin_step()
        self.stages.step = self.completed_steps
        try:
            totals = self._run(self.pipeline.actions, step_batch)
            self._weights.end_step()
            self.strategy.finish()
            self._tied.sum()
        except BaseException:  # a caller that goes on finds no gathered weights and no pending reduction of this step
            self._weights.abandon_step()
            self.strategy.abandon()
            self._mark_failed()
            raise
        numbers = self._reduction.finish_step(totals.loss_sum, totals.tokens, self._stop, mark)
        lr = self.lr_at(self.completed_steps)
        self._keep_lr_scales()
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        self.optimizer.step()
        self.completed_steps += 1
        return StepResult(self.completed_steps, lr, numbers, check.require_zero)

    def _keep_lr_scales(self) -> None:
        """Of parameter groups that are new. Others have theirs, or were loaded from a state that knows none."""
        groups = self.optimizer.param_groups
        keep_lr_scales(groups[self._num_groups :], self.config.optimizer.lr)
        self._num_groups = len(groups)

    def lr_at(self, step: int) -> float:
        """Learning rate of step ``step`` (from 0): linear warm-up, then the schedule's shape.

        A parameter group with an ``lr`` of its own, or an ``lr_scale``, has that share of it.
        """
        schedule, train = self.config.lr_schedule, self.config.train
        peak = self.config.optimizer.lr
        if step < schedule.warmup_steps:
            return peak * (step + 1) / schedule.warmup_steps
        length = max(1, train.schedule_steps - schedule.warmup_steps)
        progress = min(1.0, (step - schedule.warmup_steps) / length)
        return peak * self._lr_shape(progress, schedule.min_ratio, **schedule.options)

    def _begin_run(self) -> None:
        """A step, or the forward of an evaluation's batch, begins: on all ranks alike, also on one without samples.

        Raises:
            RuntimeError: after `close`, and under a pipeline after a run that failed.
        """
        if self._closed:
            raise RuntimeError("this engine is closed; make a new one")
        if self._broken:
            raise RuntimeError(
                "an earlier step or evaluation failed on this rank while others waited for its values: the ranks of a "
                "pipeline no longer agree on where they are. Close this engine and make a new one"
            )
        if self._failed_run is not None:
            agree_on_failure(self.context, self._failed_run, self._counts_of_evaluations)
            self._failed_run = None
        self._num_runs += 1

    def _run(self, actions: Sequence[Action], batch: StepBatch) -> StepTotals:
        """Run the stages of this rank."""
        try:
            # observers compare batches themselves, and say better where they differ
            is_identified = self.pipeline.partition is not None and not self.stages.observers
            step_id = (self._num_runs, batch.fingerprint) if is_identified else None
            with self._parallel.batch_scope.enter(batch.info):
                return self.executor.run(actions, batch.microbatches, step_id)
        except BaseException:
            self._broken = self.context.size("pipeline") > 1
            self._mark_failed()
            raise

    def _mark_failed(self) -> None:
        """What runs next asks the other ranks first whether it has failed there, too."""
        self._failed_run = self._num_runs

    # -- evaluation ---------------------------------------------------------------------------------------

    def eval_step(self, batch: Any) -> EvalResult:
        """Loss of one batch without a step, summed over the data ranks; the model's mode is left as it was.

        Args:
            batch: as for `train_step`, of any size, which may differ between data ranks; one without samples counts 0.
        """
        return self._evaluation.one_batch(batch)

    def evaluate(self) -> EvalSummary:
        """Mean loss over at most ``train.eval_batches`` validation batches.

        Raises:
            ValueError: without validation data.
        """
        if self.eval_loader is None:
            raise ValueError("there is no validation data to evaluate on")
        result, complete = self._evaluation.all_batches(
            self.eval_loader, self.config.train.eval_batches, lambda: self._stop
        )
        return EvalSummary(result.loss, result.tokens, self.completed_steps, complete)

    def _forward(self, batch: Any) -> StepTotals:
        """Sums of this rank over a batch of any size; a pipeline takes as many microbatches as divide it."""
        most = self.config.schedule.microbatches if self.pipeline.last_stage else 1
        self.stages.step = None
        self._begin_run()
        sums = StepTotals.zeros(self.device)
        for step_batch, times in self.inputs.split_evenly(batch, most):
            totals = self._run(self.pipeline.forward_actions(len(step_batch.microbatches)), step_batch)
            sums.loss_sum += totals.loss_sum / times
            sums.tokens += totals.tokens / times
        self._counts_of_evaluations = log.counts()
        return sums

    # -- life ---------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Ask to stop after the next step. The request is summed in that step's all-reduce, so that all ranks agree."""
        self._stop = True

    def withdraw_stop(self) -> None:
        """Forget a request of this rank: what it was to stop has ended."""
        self._stop = False

    def close(self) -> None:
        """Close the links between stages, and destroy the process groups."""
        self._closed = True
        self.pipeline.close()
        self.context.close()
