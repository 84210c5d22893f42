"""Normalization over features that are split over ranks: one collective in forward, one in backward.

Means and sums of squared deviations of the parts are combined as Chan, Golub and LeVeque (1979) do, so that nothing
cancels as it does in E[x^2] - E[x]^2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from colossus.comm import collectives
from colossus.context.groups import AxisGroup


def split_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, group: AxisGroup, num_dims: int, eps: float, *, centred: bool
) -> Tensor:
    """LayerNorm (``centred``) or RMSNorm over the last ``num_dims`` dims, of which the last is split over ``group``.

    Args:
        x: [.., features / ranks]; weight and bias its part of the parameters, or None.
    """
    return _SplitNorm.apply(x, weight, bias, group, num_dims, eps, centred)


def _mean_square(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    count = math.prod(x.shape[dim] for dim in dims)
    return torch.linalg.vector_norm(x, dim=dims, keepdim=True).square_().div_(count)


class _SplitNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        group: AxisGroup,
        num_dims: int,
        eps: float,
        centred: bool,
    ) -> Tensor:
        dims = tuple(range(-num_dims, 0))
        if centred:
            part = x.mean(dims, keepdim=True)
            y = x - part  # torch.var_mean takes ten times as long
            parts = collectives.all_gather(torch.stack((part, _mean_square(y, dims))).unsqueeze(0), group).wait()
            means = parts[:, 0]
            mean = means.mean(0)
            square = parts[:, 1].mean(0) + (means - mean).square_().mean(0)
            scale = (square + eps).rsqrt_()
            y.add_(part - mean).mul_(scale)
        else:
            mean = None
            square = collectives.all_reduce(_mean_square(x, dims), group, owned=True).wait() / group.size
            scale = (square + eps).rsqrt_()
            y = x * scale
        if weight is not None:
            y.mul_(weight)
        if bias is not None:
            y.add_(bias)
        ctx.save_for_backward(x, mean, scale, weight)
        ctx.group, ctx.dims, ctx.has_bias = group, dims, bias is not None
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, scale, weight = ctx.saved_tensors
        normal = (x if mean is None else x - mean) * scale
        dnormal = dy if weight is None else dy * weight
        inner = (dnormal * normal).mean(ctx.dims, keepdim=True)
        sums = inner if mean is None else torch.stack((inner, dnormal.mean(ctx.dims, keepdim=True)))
        pending = collectives.all_reduce(sums, ctx.group, owned=True)
        lead = tuple(range(dy.dim() - len(ctx.dims)))
        dweight = dbias = None
        if weight is not None and ctx.needs_input_grad[1]:
            dweight = (dy * normal).sum(lead)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            dbias = dy.sum(lead)
        sums = pending.wait() / ctx.group.size
        if mean is None:
            dx = (dnormal - normal * sums).mul_(scale)
        else:
            dx = (dnormal - sums[1]).sub_(normal.mul_(sums[0])).mul_(scale)
        return dx, dweight, dbias, None, None, None, None
