"""The one distributed matmul: every linear, in every mode, is this with another sharding.

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
from colossus.layout.activation import Activation
from colossus.layout.moves import moves
from colossus.tensor_parallel.mode import MatmulSharding
from colossus.tensor_parallel.panels import flat, gathered_weight_gradient, product
from colossus.tensor_parallel.route import Route, run
from colossus.tensor_parallel.weight_store import WeightStore


@dataclass(frozen=True)
class MatmulRoutes:
    """One linear called with x in one layout and y in another, for tensors of one number of dims.

    Attributes:
        x, w, y: routes of the operands.
        weights: fetches the weight.
        keep: whether x as gathered is kept for backward.
        panels: whether products are streamed (see `colossus.tensor_parallel.panels`).
        adds_bias: whether this rank adds the bias: of ranks whose products are summed, the first does.
    """

    x: Route
    w: Route
    y: Route
    weights: WeightStore
    keep: bool
    panels: bool
    adds_bias: bool


def matmul_routes(
    sharding: MatmulSharding,
    source: Activation,
    target: Activation,
    ndim: int,
    context: ParallelContext,
    weights: WeightStore,
    *,
    rows: Sequence[int] = (),
) -> MatmulRoutes:
    """Resolve a sharding for x stored as ``source`` and y as ``target``; ``rows`` of a fused weight as in `Route`."""
    x, y = sharding.x.at(ndim), sharding.y.at(ndim)
    return MatmulRoutes(
        x=Route.of(moves(source.at(ndim), x), context),
        w=Route.of(moves(sharding.weight, sharding.weight_used), context, rows),
        y=Route.of(moves(y, target.at(ndim)), context),
        weights=weights,
        keep=context.keep_gathered,
        panels=context.panels,
        adds_bias=all(context.coordinates[axis] == 0 for axis in sharding.y.partial),
    )


def weight_gradient(routes: MatmulRoutes, dy: Tensor, x: Tensor) -> Tensor:
    """dw as made, [out, in] in the layouts of the multiplication. dy [.., out] as used, x [.., in] as saved."""
    return gathered_weight_gradient(dy, x, () if routes.keep else routes.x.forward, panels=routes.panels)


def bias_gradient(dy: Tensor) -> Tensor:
    return flat(dy).sum(0)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, routes: MatmulRoutes) -> Tensor:
        needs_x, needs_w = x.requires_grad, weight.requires_grad
        gather = routes.x.forward
        if routes.keep:
            x, gather = run(gather, x).wait(), ()
        w_used = routes.weights.fetch(weight, routes.w).wait()
        added = bias if routes.adds_bias else None
        y = product(x, w_used, gather, routes.y.forward, added, panels=routes.panels).wait()
        x_saved = x if needs_w else None
        w_saved = (w_used if routes.weights.keeps else weight) if needs_x else None
        ctx.save_for_backward(x_saved, w_saved)
        ctx.routes, ctx.parameter = routes, weight  # not saved: checkpointing would give back a copy
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        routes: MatmulRoutes = ctx.routes
        weights = routes.weights
        x, w = ctx.saved_tensors
        weight: Tensor = ctx.parameter
        needs_x, needs_w, needs_b, _ = ctx.needs_input_grad
        dy = run(routes.y.backward, dy).wait()
        dx = dw = None
        if needs_x:
            w_used = w if weights.keeps else weights.fetch(weight, routes.w).wait()
            dx = product(dy, w_used.t(), (), routes.x.backward, panels=routes.panels)
        if needs_w and weights.can_defer_wgrad(weight):
            weights.defer_wgrad(lambda: _run_wgrad(routes, weight, dy, x))
        elif needs_w:
            dw = weights.reduce(weight, weight_gradient(routes, dy, x), routes.w)
        db = bias_gradient(dy) if needs_b else None
        return dx.wait() if dx else None, stored_gradient(weight, dw), db, None


def stored_gradient(weight: Tensor, gradient: Pending | None) -> Tensor | None:
    """What autograd is given: nothing where the gradient comes later, unless the weight has hooks, which want some."""
    if gradient is not None:
        return gradient.wait()
    return torch.zeros_like(weight) if weight._backward_hooks else None


def _run_wgrad(routes: MatmulRoutes, weight: Tensor, dy: Tensor, x: Tensor) -> None:
    dw = routes.weights.reduce(weight, weight_gradient(routes, dy, x), routes.w)
    if dw is not None:
        routes.weights.accumulate_grad(weight, dw.wait())


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, routes: MatmulRoutes) -> Tensor:
    """y = x @ weight.T + bias, all in their stored layouts."""
    return _Matmul.apply(x, weight, bias, routes)
