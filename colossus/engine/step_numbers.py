"""What the ranks add up at the end of a step or an evaluation: losses, tokens, the gradient norm, requests to stop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colossus.comm import collectives
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.strategy import Strategy
from colossus.engine.consistency import BatchCheck
from colossus.engine.eval_metrics import EvalTotals
from colossus.engine.loss_function import check_totals
from colossus.engine.results import EvalResult
from colossus.gradients.gradient_norm import GradientNorm
from colossus.layers.model_parallel import model_parallel_of


class StepReduction:
    """The numbers of a step, added up in one small all-reduce, and what gradients are to be multiplied by.

    The loss is a sum over the axes that split samples or tokens, the squared norm over the axes that shard
    parameters, and the mark of the batch over those that share one: all but data. One all-reduce goes over all: where
    the loss is the same on several ranks, one of them counts it, and so with the norm. The stages of a pipeline that do
    not have the loss, or a parameter, add zeros.

    Attributes:
        batch_check: that ranks which share a batch were given the same one.

    Args:
        norm: of the gradients of this rank.
        strategy: sums the numbers.
        clip_grad_norm: largest norm of the gradient of the mean loss; None does not clip.
    """

    def __init__(
        self,
        context: ParallelContext,
        norm: GradientNorm,
        strategy: Strategy,
        clip_grad_norm: float | None,
    ) -> None:
        self._context, self._norm, self._strategy, self._clip_grad_norm = context, norm, strategy, clip_grad_norm
        pipeline = ("pipeline",) if context.size("pipeline") > 1 else ()
        loss_axes = {*model_parallel_of(context).regions.whole.shard_axes, *pipeline}
        all_axes, coordinates = set(context.grid.names), context.coordinates
        summed_axes = set(strategy.summed_axes)
        self._loss_group = self._group_over(loss_axes)
        self._world = self._group_over(all_axes)
        self._counts_loss = all(coordinates[axis] == 0 for axis in summed_axes - loss_axes)
        self._counts_norm = all(coordinates[axis] == 0 for axis in summed_axes - set(norm.axes))
        self.batch_check = BatchCheck(context, self._group_over(summed_axes))

    def _group_over(self, axes: set[str]) -> AxisGroup:
        return self._context.group(tuple(axis for axis in self._context.grid.names if axis in axes))

    def finish_step(
        self,
        loss_sum: Tensor,
        tokens: Tensor,
        stop: float,
        mark: Tensor | None = None,
        loss_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The step's numbers, once all gradients are summed, and what the gradients are to be multiplied by.

        Args:
            loss_sum, tokens: float64 scalars of this rank.
            stop: this rank's request to end training (`results.addend`).
            mark: of the batch, where ranks share one (`BatchCheck.mark`).
            loss_scale: what losses were multiplied by before backward, if they were.

        Returns:
            Of the global batch (under an inexact strategy of the replica's): loss sum, tokens, gradient norm before
            clipping, requests to stop; then the total of the marks where there are any. The norm is not finite where
            a gradient of any rank is not.
            The factor, a float64 scalar: one over the tokens and the scale, and what clips the gradient of the mean
            loss.

        Raises:
            ValueError: on all ranks alike, when the losses cannot be divided by their number, or ranks that share a
                batch were given different ones; see `BatchCheck.check`.
        """
        zero = torch.zeros((), dtype=torch.float64, device=self._context.device)
        squares = self._strategy.squares_of_step(self._norm, self._norm.local_squares(self._context.device))
        if not self._counts_norm:  # another rank counts the same; what is not finite here stays so
            squares = squares * 0.0
        addends = [
            loss_sum if self._counts_loss else zero,
            tokens if self._counts_loss else zero,
            squares.sum(),
            zero + stop,
        ]
        if mark is not None:
            addends.append(mark)
        numbers = self._strategy.replica_scalars(torch.stack(addends))
        if mark is not None:
            self.batch_check.check(numbers[4], mark)
        if numbers.device.type == "cpu":  # elsewhere it would wait for the device
            check_totals(*numbers[:2].tolist())
        count = torch.where(numbers[1] == 0, 1.0, numbers[1])
        divisor = count if loss_scale is None else count * loss_scale
        norm = numbers[2].sqrt() / divisor
        scale = 1.0 / divisor
        if self._clip_grad_norm is not None:
            scale = scale * (self._clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        return torch.stack([numbers[0], numbers[1], norm, *numbers[3:]]), scale

    def evaluation(self, totals: EvalTotals, metrics: Sequence[str], has_ended: bool = False) -> EvalResult:
        """Sums over all ranks.

        Args:
            metrics: names of those in ``totals``.

        Raises:
            ValueError: on all ranks alike, see `goes_on` and `check_totals`.
        """
        single = torch.stack([totals.loss_sum, totals.count, torch.full_like(totals.count, float(has_ended))])
        numbers = torch.cat((single, totals.metrics.flatten()))
        total, count, ended, *of_metrics = collectives.all_reduce(numbers, self._loss_group, owned=True).wait().tolist()
        _check_all_ended(ended, self._loss_group)
        check_totals(total, count)
        pairs = zip(of_metrics[::2], of_metrics[1::2], strict=True)
        return EvalResult(total, count, dict(zip(metrics, pairs, strict=True)))

    def goes_on(self, stop: float, has_ended: bool) -> tuple[bool, float]:
        """Before each batch of an evaluation: whether to go on, and the requests to stop, the same on all ranks.

        Args:
            stop: this rank's request (`results.addend`), which ends the evaluation on all of them.
            has_ended: whether this rank found no batch the last time.

        Raises:
            ValueError: when the data has ended on some ranks and not on others.
        """
        value = torch.tensor([stop, has_ended], dtype=torch.float32, device=self._context.device)
        stops, ended = collectives.all_reduce(value, self._world, owned=True).wait().tolist()
        _check_all_ended(ended, self._world)
        return not (stops or ended), stops


def _check_all_ended(ended: float, group: AxisGroup) -> None:
    if 0 < ended < group.size:
        raise ValueError(
            f"the validation data ended on {ended:.0f} of {group.size} ranks after fewer batches than on the others: "
            f"with data.validation per_rank, or a DistributedSampler, every data rank must give as many. Set "
            f"train.eval_batches to the smallest number, or let the sampler fill up or drop what is left over"
        )
