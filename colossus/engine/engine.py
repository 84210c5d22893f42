"""The engine: a model, its optimizer and its data under one parallel context, one train step at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.config import Config
from colossus.context.parallel_context import ParallelContext
from colossus.data.batch import map_batch, share_of_batch, split_microbatches
from colossus.data.loader import Loaders
from colossus.engine.gradient_norm import GradientNorm
from colossus.engine.gradient_sync import AllReduce
from colossus.engine.results import EvalResult, EvalSummary, StepResult
from colossus.layers.layer import plan_of
from colossus.registry import LR_SCHEDULES, SCHEDULES
from colossus.schedule.executor import execute

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
LossFunction = Callable[[Any, Any], tuple[Tensor, Tensor]]


class Engine:
    """What `colossus.initialize` returns.

    Attributes:
        model: this rank's shards; call it as any module.
        loader: training batches of this data rank, without end.
        eval_loader: validation batches, or None.
        context: ranks, axes, groups.
        completed_steps: optimizer steps done.
    """

    def __init__(
        self,
        config: Config,
        context: ParallelContext,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer,
        strategy: AllReduce,
        loaders: Loaders | None,
    ) -> None:
        self.config, self.context, self.model, self.loss_fn = config, context, model, loss_fn
        self.optimizer, self.strategy, self.loaders = optimizer, strategy, loaders
        self.device = context.device
        self.completed_steps = 0
        #: where the launcher keeps what this run writes; None outside of a launch
        self.run_dir: Path | None = None
        self._stop = False
        self._norm = GradientNorm(model.parameters(), context)
        self._dtype = DTYPES[config.train.precision]
        plan = plan_of(context)
        self._weights = plan.weights
        self._batch_axes = plan.regions.user.shard_axes
        # the axes beside data over which a model's batch is split at its door
        self._door = tuple(axis for axis in plan.regions.user.batch if axis not in context.grid.axes("data"))
        # one small all-reduce per step carries loss, token count, gradient norm and the wish to stop
        loss_axes, norm_axes, at = set(self._batch_axes), set(self._norm.axes), context.coordinates
        self._step_group = context.group(tuple(axis for axis in context.grid.names if axis in loss_axes | norm_axes))
        self._counts_loss = all(at[axis] == 0 for axis in norm_axes - loss_axes)
        self._counts_norm = all(at[axis] == 0 for axis in loss_axes - norm_axes)
        self._actions = SCHEDULES.get(config.schedule.type)(1, config.schedule.microbatches)[0]
        self._lr_shape = LR_SCHEDULES.get(config.lr_schedule.type)

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
        if not self.model.training:  # asked first: a submodule that a user has put into eval mode stays there
            self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        self._weights.begin_step()
        try:
            totals = execute(
                self._actions,
                microbatches,
                self._forward,
                before_backward=self.context.rng.return_to,
                before_last_backward=self._arm,
                reduce=self._finish_gradients,
            )
        except BaseException:  # whoever catches it finds no weights and no half of a reduction of this step
            self._weights.abandon_step()
            self.strategy.disarm()
            raise
        numbers = self._reduce_numbers(totals.loss_sum, totals.tokens)
        lr = self.lr_at(self.completed_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        self.optimizer.step()
        self.completed_steps += 1
        return StepResult(self.completed_steps, lr, numbers)

    def _forward(self, index: int, microbatch: Any) -> tuple[Tensor, Tensor]:
        self.context.rng.move_to(self.completed_steps, index)
        with self.context:
            return self._apply(microbatch)

    def _apply(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Model and loss on this rank's part of a data rank's batch."""
        part = self.own_part(batch)
        return self._loss(self.model(model_input(part)), part)

    def own_part(self, batch: Any) -> Any:
        """The samples of a data rank's batch that this rank's model takes, in the precision of the run.

        All of them, or the rank's part in modes that split a batch.
        """
        if self._door:
            batch = share_of_batch(batch, self.context.index(self._door), self.context.size(self._door))
        return map_batch(self._cast, batch)

    def _cast(self, x: Tensor) -> Tensor:
        """Numbers in the precision of the run: data of float32 would not multiply with weights of float64."""
        return x.to(self._dtype) if x.is_floating_point() else x

    def _arm(self) -> None:
        self._weights.arm()
        self.strategy.arm()

    def _finish_gradients(self) -> None:
        self._weights.end_step()
        self.strategy.finish()

    def _loss(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        result = self.loss_fn(outputs, batch)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)):
            raise ValueError(
                f"the loss function returned {_describe(result)}; it must return (sum, count): the sum of the losses "
                f"of all valid samples or tokens, and their number, so that the mean over the global batch does not "
                f"depend on how it is split. For example: "
                f"F.cross_entropy(logits, labels, reduction='sum'), labels.numel()"
            )
        total, count = result
        if total.dim():
            raise ValueError(f"the loss function returned a sum of shape {tuple(total.shape)}; it must be a scalar")
        return total, torch.as_tensor(count, device=total.device)

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
            loss_sum, tokens = self._apply(batch)
            return self._reduce_evaluation(loss_sum.double(), tokens.double())

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
                loss, count = self._apply(batch)
                loss_sum += loss
                tokens += count
            result = self._reduce_evaluation(loss_sum, tokens)
        return EvalSummary(result.loss, result.tokens, self.completed_steps, complete)

    def _agree_to_stop(self) -> bool:
        wish = torch.full((), float(self._stop), device=self.device)
        return bool(collectives.all_reduce(wish, self._step_group, owned=True).wait() > 0)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        was_training = self.model.training
        self.model.eval()
        try:
            with self.context:
                yield
        finally:
            self.model.train(was_training)

    def _reduce_evaluation(self, loss_sum: Tensor, tokens: Tensor) -> EvalResult:
        group = self.context.group(self._batch_axes)
        numbers = collectives.all_reduce(torch.stack([loss_sum, tokens]), group, owned=True).wait().tolist()
        return EvalResult(numbers[0], round(numbers[1]))

    # -- life ---------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Ask for an end after the next step; it travels with that step's all-reduce, so all ranks agree on it."""
        self._stop = True

    def close(self) -> None:
        """Destroy the process groups."""
        self.context.close()


def model_input(batch: Any) -> Any:
    """What the model is called with: ``batch["inputs"]``, the first of a tuple, or the batch itself."""
    if isinstance(batch, dict):
        if "inputs" not in batch:
            raise ValueError(f"a batch that is a dict needs the key 'inputs' for the model; it has {sorted(batch)}")
        return batch["inputs"]
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def _describe(result: Any) -> str:
    if isinstance(result, Tensor):
        return f"one tensor of shape {tuple(result.shape)}"
    return f"a {type(result).__name__}"
