"""The one distributed matmul: every linear, in every mode, is this with another table.

    y  = reduce_c(gather_a(x) @ gather_b(w).T)
    dx = reduce_a(gather_c(dy) @ gather_b(w))        dw = reduce_b(gather_c(dy).T @ gather_a(x))

Moving operands, multiplying, and the two gradients are separate functions, so that a schedule can call them apart.
In backward the reduction of dx travels while dw is computed; x is gathered again while dx is, unless it was kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.context.parallel_context import ParallelContext
from colossus.layers.route import Route, run
from colossus.layers.tensor_mode import MatmulTable
from colossus.layers.weights import WeightStore, deliver
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout, gradient_axes
from colossus.layout.moves import moves


@dataclass(frozen=True)
class MatmulPlan:
    """One linear called with x in one layout and y in another, for tensors of one number of dims.

    Attributes:
        x, w, y: routes of the operands.
        weights: fetches the weight.
        keep: whether x as gathered is kept for backward.
        adds_bias: whether this rank adds the bias: of ranks whose products are summed, the first does.
        weight_axes, bias_axes: over which the gradients stay partial after the backward of this matmul.
    """

    x: Route
    w: Route
    y: Route
    weights: WeightStore
    keep: bool
    adds_bias: bool
    weight_axes: tuple[str, ...]
    bias_axes: tuple[str, ...]


def make_plan(
    table: MatmulTable,
    source: Activation,
    target: Activation,
    ndim: int,
    context: ParallelContext,
    weights: WeightStore,
    *,
    keep: bool,
    rows: Sequence[int] = (),
) -> MatmulPlan:
    """Resolve a table for x stored as ``source`` and y as ``target``; ``rows`` of a fused weight as in `Route`."""
    x, y = table.x.at(ndim), table.y.at(ndim)
    return MatmulPlan(
        x=Route.of(moves(source.at(ndim), x), context),
        w=Route.of(moves(table.weight, table.weight_used), context, rows),
        y=Route.of(moves(y, target.at(ndim)), context),
        weights=weights,
        keep=keep,
        adds_bias=all(context.coordinates[axis] == 0 for axis in table.y.partial),
        weight_axes=gradient_axes(table.weight, x, y),
        bias_axes=gradient_axes(Layout((table.y.features,)), y),
    )


def input_gradient(dy: Tensor, w: Tensor) -> Tensor:
    """dx as made. dy [.., out], w [out, in] -> [.., in], in the layouts of the multiplication."""
    return dy @ w


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dw as made. dy [.., out], x [.., in] -> [out, in], summed over all leading dims."""
    return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def bias_gradient(dy: Tensor) -> Tensor:
    return dy.reshape(-1, dy.shape[-1]).sum(0)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: MatmulPlan) -> Tensor:
        coming = run(plan.x.there, x)
        w_used = plan.weights.fetch(weight, plan.w).wait()
        x_used = coming.wait()
        y = F.linear(x_used, w_used, bias if plan.adds_bias else None)
        y = run(plan.y.there, y, owned=True).wait()
        needs_x, needs_w = x.requires_grad, weight.requires_grad
        x_saved = (x_used if plan.keep else x) if needs_w else None
        w_saved = (w_used if plan.weights.keeps else weight) if needs_x else None
        ctx.save_for_backward(x_saved, w_saved, weight)
        ctx.plan = plan
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        plan: MatmulPlan = ctx.plan
        weights = plan.weights
        x, w, weight = ctx.saved_tensors
        needs_x, needs_w, needs_b, _ = ctx.needs_input_grad
        dy = run(plan.y.back, dy).wait()
        coming = run(() if plan.keep else plan.x.there, x) if needs_w and not weights.is_deferring else None
        dx = dw = None
        if needs_x:
            w_used = w if weights.keeps else weights.fetch(weight, plan.w).wait()
            dx = run(plan.x.back, input_gradient(dy, w_used), owned=True)
        if coming is not None:
            dw = weights.reduce(weight, weight_gradient(dy, coming.wait()), plan.w)
        elif needs_w:
            weights.defer(lambda: _weight_later(plan, weight, dy, x))
        db = bias_gradient(dy) if needs_b else None
        return dx.wait() if dx else None, dw.wait() if dw else None, db, None


def _weight_later(plan: MatmulPlan, weight: Tensor, dy: Tensor, x: Tensor) -> None:
    x_used = x if plan.keep else run(plan.x.there, x).wait()
    dw = plan.weights.reduce(weight, weight_gradient(dy, x_used), plan.w)
    if dw is not None:
        deliver(weight, dw.wait())


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, plan: MatmulPlan) -> Tensor:
    """y = x @ weight.T + bias, all in their stored layouts."""
    return _Matmul.apply(x, weight, bias, plan)
