"""The numbers of a step, added up over the ranks: losses, tokens, the gradient norm, requests to stop."""

from __future__ import annotations

import torch
from torch import Tensor

from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.strategy import Strategy
from colossus.engine.consistency import BatchCheck
from colossus.engine.loss_function import check_totals
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
        coordinates, summed_axes = context.coordinates, set(strategy.summed_axes)
        self._counts_loss = all(coordinates[axis] == 0 for axis in summed_axes - set(loss_axes(context)))
        self._counts_norm = all(coordinates[axis] == 0 for axis in summed_axes - set(norm.axes))
        self.batch_check = BatchCheck(context)

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
            clipping, requests to stop. The norm is not finite where a gradient of any rank is not.
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
        loss = [loss_sum, tokens] if self._counts_loss else [zero, zero]
        numbers = torch.stack([*loss, squares.sum(), zero + stop, *([] if mark is None else [mark])])
        numbers = self._strategy.replica_scalars(numbers)
        if mark is not None:
            self.batch_check.check(numbers[4])
        if numbers.device.type == "cpu":  # elsewhere it would wait for the device
            check_totals(*numbers[:2].tolist())
        count = torch.where(numbers[1] == 0, 1.0, numbers[1])
        divisor = count if loss_scale is None else count * loss_scale
        norm = numbers[2].sqrt() / divisor
        scale = 1.0 / divisor
        if self._clip_grad_norm is not None:
            scale = scale * (self._clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        return torch.stack([numbers[0], numbers[1], norm, numbers[3]]), scale


def loss_axes(context: ParallelContext) -> tuple[str, ...]:
    """The axes over which losses are summed: those that split samples or tokens, and the pipeline's."""
    split = model_parallel_of(context).regions.whole.shard_axes
    return tuple(
        axis for axis in context.grid.names if axis in split or (axis == "pipeline" and context.size("pipeline") > 1)
    )
