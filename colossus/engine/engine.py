"""The engine: a model, its optimizer and its data under one parallel context, one train step at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.config import Config
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.data.batch import batch_size_of, split_microbatches
from colossus.data.loader import Loaders
from colossus.engine.gradients.gradient_norm import GradientNorm
from colossus.engine.gradients.tied import TiedGradients
from colossus.engine.inputs import batch_axes, checked_loss, fingerprint, local_batch, model_input, note_length
from colossus.engine.pipeline import Pipeline
from colossus.engine.results import EvalResult, EvalSummary, StepResult
from colossus.engine.stages import ModelStages, parameters_by_stage
from colossus.layers.model_parallel import model_parallel_of
from colossus.registry import LR_SCHEDULES, STRATEGIES
from colossus.schedule.actions import Action
from colossus.schedule.runtime.executor import Totals

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
LossFunction = Callable[[Any, Any], tuple[Tensor, Tensor]]


class Engine:
    """What `colossus.initialize` returns.

    Attributes:
        model: this rank's shards; call it as any module, unless a pipeline has cut it into stages.
        loader: training batches of this data rank, without end.
        eval_loader: validation batches, or None.
        context: ranks, axes, groups.
        pipeline: schedule and partition.
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
        pipeline: Pipeline,
        loaders: Loaders | None,
    ) -> None:
        self.config, self.context, self.model, self.loss_fn = config, context, model, loss_fn
        self.optimizer, self.loaders = optimizer, loaders
        self.pipeline = pipeline
        self.device = context.device
        self.completed_steps = 0
        #: where the launcher keeps what this run writes; None outside of a launch
        self.run_dir: Path | None = None
        self._stop = False
        dtype = DTYPES[config.train.precision]
        parallel = model_parallel_of(context)
        self._weights = parallel.weights
        parts = parameters_by_stage(pipeline.actions, lambda stage: pipeline.parameters_on(stage, model))
        self.strategy = STRATEGIES.build(
            config.parallel.strategy.spec(),
            model=model,
            context=context,
            bucket_mb=config.comm.bucket_mb,
            parts=list(parts.values()),
        )
        self._tied = TiedGradients(pipeline.shared(model), context)
        self._norm = GradientNorm(model.parameters(), context, self._tied.counted_elsewhere)
        self.stages = ModelStages(
            context,
            pipeline.calls(model),
            pipeline.last,
            door=lambda batch: local_batch(batch, context, dtype, pad=config.parallel.sequence.pad),
            enter=model_input,
            loss=lambda outputs, batch: checked_loss(self.loss_fn(outputs, batch)),
            weights=parallel.weights,
            strategy=self.strategy,
            parts=parts,
            splits_backward=pipeline.splits_backward,
            draws=pipeline.draws(),
        )
        self.executor = pipeline.executor(self.stages, parallel)
        # one small all-reduce per step carries loss, token count, gradient norm and the wish to stop; the stages of a
        # pipeline that do not have the loss, or a parameter, add zeros
        pipes = ("pipeline",) if context.size("pipeline") > 1 else ()
        loss_axes, norm_axes, at = (
            {*parallel.regions.user.shard_axes, *pipes},
            set(self._norm.axes),
            context.coordinates,
        )
        self._loss_group = self._group_over(loss_axes)
        self._step_group = self._group_over(loss_axes | norm_axes)
        self._counts_loss = all(at[axis] == 0 for axis in norm_axes - loss_axes)
        self._counts_norm = all(at[axis] == 0 for axis in loss_axes - norm_axes)
        self._lr_shape = LR_SCHEDULES.get(config.lr_schedule.type)
        self._broken = self._closed = False
        self._runs = 0

    def _group_over(self, axes: set[str]) -> AxisGroup:
        return self.context.group(tuple(axis for axis in self.context.grid.names if axis in axes))

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
        """One optimizer step on this data rank's part of the global batch.

        Args:
            batch: a nest of tensors, dim 0 the samples; every rank of a model passes the same one. Split into
                ``schedule.microbatches`` along dim 0, and each of these over the tensor axes that split a batch.

        Returns:
            Loss and gradient norm of the global batch, the same on all ranks.

        Raises:
            ValueError: when the batch does not divide, or the loss function does not return (sum, count).
        """
        microbatches = split_microbatches(batch, self.config.schedule.microbatches)
        note_length(batch, self.context)
        if not self.model.training:  # asked first: a submodule that a user has put into eval mode stays there
            self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        self._weights.begin_step()
        self.stages.step = self.completed_steps
        try:
            totals = self._run(self.pipeline.actions, microbatches, batch)
            self._weights.end_step()
            self.strategy.finish()
            self._tied.sum()
        except BaseException:  # whoever catches it finds no weights and no half of a reduction of this step
            self._weights.abandon_step()
            self.strategy.abandon()
            raise
        numbers = self._reduce_numbers(totals.loss_sum, totals.tokens)
        lr = self.lr_at(self.completed_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        self.optimizer.step()
        self.completed_steps += 1
        return StepResult(self.completed_steps, lr, numbers)

    def _reduce_numbers(self, loss_sum: Tensor, tokens: Tensor) -> Tensor:
        """[loss sum, tokens, gradient norm, stop]; gradients divided by the tokens and clipped."""
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        square = self._norm.local_square(self.device)
        numbers = torch.stack(
            [
                loss_sum if self._counts_loss else zero,
                tokens if self._counts_loss else zero,
                square if self._counts_norm else zero,
                zero + float(self._stop),
            ]
        )
        numbers = collectives.all_reduce(numbers, self._step_group, owned=True).wait()
        count = torch.where(numbers[1] == 0, 1.0, numbers[1])
        norm = numbers[2].sqrt() / count
        scale = 1.0 / count
        limit = self.config.train.clip_grad_norm
        if limit is not None:
            scale = scale * (limit / (norm + 1e-6)).clamp(max=1.0)
        for grads in self._norm.gradients():
            torch._foreach_mul_(grads, scale.to(grads[0].dtype))
        return torch.stack([numbers[0], numbers[1], norm, numbers[3]])

    def lr_at(self, step: int) -> float:
        """Learning rate of step ``step`` (from 0): linear warm-up, then the schedule's shape."""
        schedule, train = self.config.lr_schedule, self.config.train
        peak = self.config.optimizer.lr
        if step < schedule.warmup_steps:
            return peak * (step + 1) / schedule.warmup_steps
        length = max(1, train.schedule_steps - schedule.warmup_steps)
        progress = min(1.0, (step - schedule.warmup_steps) / length)
        return peak * self._lr_shape(progress, schedule.min_ratio, **schedule.options)

    # -- evaluation ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def eval_step(self, batch: Any) -> EvalResult:
        """Loss of one batch without a step, summed over the data ranks; the model's mode is left as it was."""
        with self._evaluating():
            return self._reduce_evaluation(*self._evaluate(batch))

    @torch.no_grad()
    def evaluate(self) -> EvalSummary:
        """Mean loss over at most ``train.eval_batches`` validation batches.

        Raises:
            ValueError: without validation data.
        """
        if self.eval_loader is None:
            raise ValueError("there is no validation data to evaluate on")
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        tokens = torch.zeros((), dtype=torch.float64, device=self.device)
        complete = True
        with self._evaluating():
            for index, batch in enumerate(self.eval_loader):
                if index == self.config.train.eval_batches:
                    break
                if self._agree_to_stop():
                    complete = False
                    break
                loss, count = self._evaluate(batch)
                loss_sum += loss
                tokens += count
            result = self._reduce_evaluation(loss_sum, tokens)
        return EvalSummary(result.loss, result.tokens, self.completed_steps, complete)

    def _evaluate(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Sum of losses and count of this rank; a pipeline takes as many microbatches as divide the batch."""
        count = 1
        note_length(batch, self.context)
        if self.pipeline.last:
            size = batch_size_of(batch) // self.context.size(batch_axes(self.context))
            count = next(n for n in range(self.config.schedule.microbatches, 0, -1) if size % n == 0)
        totals = self._run(self.pipeline.forwards(count), split_microbatches(batch, count), batch)
        return totals.loss_sum, totals.tokens

    def _run(self, actions: Sequence[Action], microbatches: Sequence[Any], batch: Any) -> Totals:
        """Run the stages of this rank.

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
        self._runs += 1
        try:
            # who observes says himself, and better, where batches differ
            is_marked = self.pipeline.partition is not None and not self.stages.observers
            mark = (self._runs, fingerprint(batch)) if is_marked else None
            return self.executor.run(actions, microbatches, mark)
        except BaseException:
            self._broken = self.context.size("pipeline") > 1
            raise

    def _agree_to_stop(self) -> bool:
        wish = torch.full((), float(self._stop), device=self.device)
        return bool(collectives.all_reduce(wish, self._step_group, owned=True).wait() > 0)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        was_training = [(module, module.training) for module in self.model.modules()]
        self.stages.step = None
        self.model.eval()
        try:
            with self.context:
                yield
        finally:
            for module, mode in was_training:  # one by one: a user may have put some into eval mode
                module.training = mode

    def _reduce_evaluation(self, loss_sum: Tensor, tokens: Tensor) -> EvalResult:
        numbers = collectives.all_reduce(torch.stack([loss_sum, tokens]), self._loss_group, owned=True).wait()
        total, count = numbers.tolist()
        return EvalResult(total, round(count))

    # -- life ---------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Ask for an end after the next step; it travels with that step's all-reduce, so all ranks agree on it."""
        self._stop = True

    def close(self) -> None:
        """Close the links between stages, and destroy the process groups."""
        self._closed = True
        self.pipeline.close()
        self.context.close()
