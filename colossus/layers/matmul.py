"""The one distributed matmul: every linear, in every mode, is this with another table.

    y  = reduce_c(gather_a(x) @ gather_b(w).T)
    dx = reduce_a(gather_c(dy) @ gather_b(w))        dw = reduce_b(gather_c(dy).T @ gather_a(x))

Moving operands, multiplying, and the two gradients are separate functions, so that a schedule can call them apart.
In backward the reduction of dx travels while dw is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colossus.comm.collectives import Pending
from colossus.context.parallel_context import ParallelContext
from colossus.layers.panels import flat, gathered_weight_gradient, product
from colossus.layers.route import Route, run
from colossus.layers.tensor_mode import MatmulTable
from colossus.layers.weights import WeightStore
from colossus.layout.activation import Activation
from colossus.layout.moves import moves


@dataclass(frozen=True)
class MatmulPlan:
    """One linear called with x in one layout and y in another, for tensors of one number of dims.

    Attributes:
        x, w, y: routes of the operands.
        weights: fetches the weight.
        keep: whether x as gathered is kept for backward.
        panels: whether products are streamed (see `colossus.layers.panels`).
        adds_bias: whether this rank adds the bias: of ranks whose products are summed, the first does.
    """

    x: Route
    w: Route
    y: Route
    weights: WeightStore
    keep: bool
    panels: bool
    adds_bias: bool


def make_plan(
    table: MatmulTable,
    source: Activation,
    target: Activation,
    ndim: int,
    context: ParallelContext,
    weights: WeightStore,
    *,
    rows: Sequence[int] = (),
) -> MatmulPlan:
    """Resolve a table for x stored as ``source`` and y as ``target``; ``rows`` of a fused weight as in `Route`."""
    x, y = table.x.at(ndim), table.y.at(ndim)
    return MatmulPlan(
        x=Route.of(moves(source.at(ndim), x), context),
        w=Route.of(moves(table.weight, table.weight_used), context, rows),
        y=Route.of(moves(y, target.at(ndim)), context),
        weights=weights,
        keep=context.keep_gathered,
        panels=context.panels,
        adds_bias=all(context.coordinates[axis] == 0 for axis in table.y.partial),
    )


def weight_gradient(plan: MatmulPlan, dy: Tensor, x: Tensor) -> Tensor:
    """dw as made, [out, in] in the layouts of the multiplication. dy [.., out] as used, x [.., in] as saved."""
    return gathered_weight_gradient(dy, x, () if plan.keep else plan.x.there, panels=plan.panels)


def bias_gradient(dy: Tensor) -> Tensor:
    return flat(dy).sum(0)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: MatmulPlan) -> Tensor:
        needs_x, needs_w = x.requires_grad, weight.requires_grad
        gather = plan.x.there
        if plan.keep:
            x, gather = run(gather, x).wait(), ()
        w_used = plan.weights.fetch(weight, plan.w).wait()
        added = bias if plan.adds_bias else None
        y = product(x, w_used, gather, plan.y.there, added, panels=plan.panels).wait()
        x_saved = x if needs_w else None
        w_saved = (w_used if plan.weights.keeps else weight) if needs_x else None
        ctx.save_for_backward(x_saved, w_saved)
        ctx.plan, ctx.parameter = plan, weight  # not saved: checkpointing would give back a copy
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        plan: MatmulPlan = ctx.plan
        weights = plan.weights
        x, w = ctx.saved_tensors
        weight: Tensor = ctx.parameter
        needs_x, needs_w, needs_b, _ = ctx.needs_input_grad
        dy = run(plan.y.back, dy).wait()
        dx = dw = None
        if needs_x:
            w_used = w if weights.keeps else weights.fetch(weight, plan.w).wait()
            dx = product(dy, w_used.t(), (), plan.x.back, panels=plan.panels)
        if needs_w and weights.can_defer(weight):
            weights.defer(lambda: _weight_later(plan, weight, dy, x))
        elif needs_w:
            dw = weights.reduce(weight, weight_gradient(plan, dy, x), plan.w)
        db = bias_gradient(dy) if needs_b else None
        return dx.wait() if dx else None, stored_gradient(weight, dw), db, None


def stored_gradient(weight: Tensor, gradient: Pending | None) -> Tensor | None:
    """What autograd is given: nothing where the gradient comes later, unless the weight has hooks, which want some."""
    if gradient is not None:
        return gradient.wait()
    return torch.zeros_like(weight) if weight._backward_hooks else None


def _weight_later(plan: MatmulPlan, weight: Tensor, dy: Tensor, x: Tensor) -> None:
    dw = plan.weights.reduce(weight, weight_gradient(plan, dy, x), plan.w)
    if dw is not None:
        plan.weights.deliver(weight, dw.wait())


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, plan: MatmulPlan) -> Tensor:
    """y = x @ weight.T + bias, all in their stored layouts."""
    return _Matmul.apply(x, weight, bias, plan)
