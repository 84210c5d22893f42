"""The one distributed matmul: every linear, in every mode, is this with another sharding.

    forward  y  = reduce_c(gather_a(x) @ gather_b(w).T)
    dgrad    dx = reduce_a(gather_c(dy) @ gather_b(w))
    wgrad    dw = reduce_b(gather_c(dy).T @ gather_a(x))

The letters name an operand's moves over mesh axes: a those of x, b those of w, c those of y. Gather and reduce of one
letter are each other's dual: all-gather and reduce-scatter, or identity and all-reduce; a letter whose axes split
nothing moves nothing. All gathers of a product start before the first is waited for, those of wgrad before dgrad runs.
While dx is being reduced, dw is computed; or the other way round where more of dw is reduced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.comm.autograd import first_order, save_for_backward, saved_tensors
from colossus.comm.conjugate import not_a_view
from colossus.comm.kept_results import kept
from colossus.comm.pending import Pending, Ready
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.layout.moves import moves
from colossus.tensor_parallel.dtypes import gradient_dtype, product_dtype, to_product_dtype
from colossus.tensor_parallel.gathered_weights import GatheredWeights
from colossus.tensor_parallel.mode import MatmulSharding
from colossus.tensor_parallel.move_plan import MovePlan, groups_of, moved_shape, note_weight, run
from colossus.tensor_parallel.panels import Panels
from colossus.tensor_parallel.tiled_products import TiledProducts


@dataclass(frozen=True)
class MatmulPlans:
    """The moves of one linear, for x of one layout and number of dims and y of another layout.

    Attributes:
        x, w, y: moves of the operands.
        groups: the groups of these moves.
        weights: gathers the weight and reduces its gradient.
        keep: backward uses the x that forward gathered; else it gathers x again.
        adds_bias: this rank adds the bias: among ranks whose products are summed, the first does.
        panels: the most panels of rows, see `colossus.tensor_parallel.panels`.
        tiles: multiplies with the same bits under any number of ranks; None: as fast as the device can.
    """

    x: MovePlan
    w: MovePlan
    y: MovePlan
    groups: tuple[AxisGroup, ...]
    weights: GatheredWeights
    keep: bool
    adds_bias: bool
    panels: int = 1
    tiles: TiledProducts | None = None

    def start_forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Pending:
        """Multiply, and start to sum y; the bias is added by one of the ranks whose products are summed."""
        if self.tiles is None:
            return run(self.y.forward, product(x, w, bias if self.adds_bias else None), owned=True)
        y = run(self.y.forward, self.tiles.product(x, w), owned=True)
        return y.then(lambda total: (total if bias is None else total + bias).to(x.dtype))

    def start_dgrad(self, dy: Tensor, w: Tensor) -> Pending:
        """Multiply, and start to sum dx."""
        if self.tiles is None:
            return run(self.x.backward, product(dy, w.t()), owned=True)
        dx = run(self.x.backward, self.tiles.dgrad(dy, w), owned=True)
        return dx.then(lambda total: total.to(dy.dtype))

    def wgrad(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's addend of dw."""
        return wgrad_product(dy, x) if self.tiles is None else self.tiles.wgrad(dy, x, weight)

    def bias_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        return bias_gradient(dy) if self.tiles is None else self.tiles.bias_gradient(dy, weight).to(dy.dtype)


def matmul_plans(
    sharding: MatmulSharding,
    source: Activation,
    target: Activation,
    ndim: int,
    context: ParallelContext,
    weights: GatheredWeights,
    *,
    rows: Sequence[int] = (),
) -> MatmulPlans:
    """Return the moves of a linear whose x has ``ndim`` dims and layout ``source``, and whose y has ``target``.

    Args:
        rows: rows of a fused weight, see `MovePlan.of`.
    """
    x, y = sharding.x.at(ndim), sharding.y.at(ndim)
    operands = (
        MovePlan.of(moves(source.at(ndim), x), context),
        MovePlan.of(moves(sharding.weight, sharding.gathered_weight), context, rows),
        MovePlan.of(moves(y, target.at(ndim)), context),
    )
    return MatmulPlans(
        *operands,
        groups=groups_of(*operands),
        weights=weights,
        keep=context.options.keep_gathered,
        adds_bias=all(context.coordinates[axis] == 0 for axis in sharding.y.partial),
        panels=context.options.panels,
        tiles=tiles_of(context, sharding.gathered_weight, rows),
    )


def tiles_of(context: ParallelContext, weight: Layout, rows: Sequence[int] = ()) -> TiledProducts | None:
    """Return the tiles of products with a weight of this layout, where ``train.reproducible`` asks for them."""
    if not context.options.reproducible:
        return None
    return TiledProducts(context.size(weight.dims[0]), context.size(weight.dims[1]), tuple(rows))


def _gathered_input(plans: MatmulPlans, x: Tensor) -> Pending:
    """Start to gather x for wgrad from what forward saved (see `_Matmul`)."""
    return Ready(x) if plans.keep else run(plans.x.forward, x)


class _Matmul(torch.autograd.Function):
    """x @ weight.T + bias on one rank. Shapes are per rank; rows are all dims of x but the last.

        x        [m_x, k_x]  stored   -gather_a->   [m, k]
        weight   [n_w, k_w]  stored   -gather_b->   [n, k]
        product  [m, n]               -reduce_c->   y [m_y, n_y]

        forward  y  [m_y, n_y] = reduce_c(x [m, k] @ weight [n, k].T + bias [n])
        dgrad    dx [m_x, k_x] = reduce_a(dy [m, n] @ weight [n, k])    the dual of gather_a
        wgrad    dw [n_w, k_w] = reduce_b(dy [m, n].T @ x [m, k])       the dual of gather_b
        dbias       [n]        = dy [m, n].sum(0)

    dgrad and wgrad take dy gathered, gather_c(dy [m_y, n_y]), the dual of reduce_c. For M rows, K and N features:

        1D column  x [M, K]        weight [N/p, K]          y [M, N/p]      a: identity, all-reduce of dx
        1D row     x [M, K/p]      weight [N, K/p]          y [M, N]        c: all-reduce of y, identity
        2D         x [M/q, K/q]    weight [N/q, K/q]        y [M/q, N/q]    a: gathered to [M/q, K]; b: to [N/q, K]
        3D column  x [M/ij, K/k]   weight [N/ji, K/k]       y [M/ik, N/j]   a: [M/i, K/k]; b: [N/j, K/k];
                                                                            c: the sum [M/i, N/j] is scattered over k

    Forward saves x (gathered with ``MatmulPlans.keep``, else stored) and the weight (gathered with
    ``GatheredWeights.keeps``). One of the ranks whose products are summed adds the bias. The bias is stored in the
    layout of the sum, so that dbias needs no move here; the sum over its replicas comes with the other gradients.

    Under `torch.autocast` x has its dtype, and so have y and dy. The weight is cast before it is gathered, and its
    gradient is cast to the dtype of ``weight.grad`` before it is reduced (`reduce_wgrad`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plans: MatmulPlans) -> Tensor:
        note_weight(plans.groups, weight)
        gather = plans.x.forward
        # under autocast x has the dtype of the product; without it torch refuses mixed dtypes
        dtype = weight.dtype if product_dtype(x) is None else x.dtype
        w_pending = plans.weights.gather(weight, plans.w, dtype) if plans.weights.keeps else None
        if plans.keep and gather:
            stored, moves = x, gather
            x, gather = kept("a gathered input", lambda: run(moves, stored).wait()), ()
        w_gathered = None if w_pending is None else w_pending.wait()
        # first: a recomputation ends here if no later operation needs y
        x_saved = x if ctx.needs_input_grad[1] else None
        w_saved = (weight if w_gathered is None else w_gathered) if ctx.needs_input_grad[0] else None
        save_for_backward(ctx, x_saved, w_saved)
        ctx.plans, ctx.parameter = plans, weight  # not saved for backward: checkpointing would return a copy

        def compute() -> Tensor:
            w = plans.weights.gather(weight, plans.w, dtype) if w_gathered is None else Ready(w_gathered)
            own_bias = None if bias is None else bias.to(dtype)
            if (panels := Panels.of(plans.panels, x, gather, plans.y.forward)) is not None:
                return not_a_view(panels.multiply(x, w, own_bias if plans.adds_bias else None).wait())
            x_gathered = run(gather, x).wait()
            return not_a_view(plans.start_forward(x_gathered, w.wait(), own_bias).wait())

        return kept("a distributed product", compute, is_product=True)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w = saved_tensors(ctx)  # first: under checkpointing this runs a user's forward
        with torch._C.DisableTorchFunctionSubclass():
            plans: MatmulPlans = ctx.plans
            weights = plans.weights
            weight: Tensor = ctx.parameter
            note_weight(plans.groups, weight)
            needs_x, needs_w, needs_b, _ = ctx.needs_input_grad
            is_deferred = needs_w and weights.deferral.takes(weight)
            wgrad_first = _reduces_more_of_weight(plans, weight, dy)
            # of dgrad, and where wgrad comes first it waits for all of dy anyway
            panels = Panels.of(plans.panels, dy, plans.y.backward, plans.x.backward) if needs_x else None
            panels = panels if panels is not None and panels.before and not wgrad_first else None
            dy_gathered = run(plans.y.backward, dy) if panels is None else None
            w_gathered = Ready(w) if weights.keeps or not needs_x else weights.gather(weight, plans.w, dy.dtype)
            x_gathered = _gathered_input(plans, x) if needs_w and not is_deferred else None
            dx = dw = None
            if dy_gathered is not None:
                dy = dy_gathered.wait()
            elif panels is not None:
                moved: list[Tensor] = []
                dx = panels.multiply(dy, w_gathered.then(Tensor.t), moved=moved)
                dy = panels.join(moved, panels.moved_blocks) if needs_w or needs_b else dy
            for wants_wgrad in (True, False) if wgrad_first else (False, True):
                if needs_x and dx is None and not wants_wgrad:
                    dx = plans.start_dgrad(dy, w_gathered.wait())
                if is_deferred and wants_wgrad:
                    weights.deferral.defer(lambda: _deferred_wgrad(plans, weight, dy, x))
                elif x_gathered is not None and wants_wgrad:
                    dw = weights.reduce(weight, plans.wgrad(dy, x_gathered.wait(), weight), plans.w)
            db = plans.bias_gradient(dy, weight) if needs_b else None
            return dx.wait() if dx else None, dw.wait() if dw else None, db, None


def _reduces_more_of_weight(plans: MatmulPlans, weight: Tensor, dy: Tensor) -> bool:
    """Return whether dw [o, i] is reduced, and is larger than dx [.., i], so that its reduction runs beside dgrad.

    Args:
        dy: [.., n_y], before its moves.
    """
    if not plans.w.backward:
        return False
    *rows, outputs = moved_shape(dy.shape, plans.y.backward)
    return outputs * gradient_dtype(weight).itemsize > math.prod(rows) * dy.itemsize


def _deferred_wgrad(plans: MatmulPlans, weight: Tensor, dy: Tensor, x: Tensor) -> None:
    note_weight(plans.groups, weight)
    dw = plans.weights.reduce(weight, plans.wgrad(dy, _gathered_input(plans, x).wait(), weight), plans.w)
    if dw is not None:
        plans.weights.deferral.accumulate(weight, dw.wait())


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, plans: MatmulPlans) -> Tensor:
    """Return y = x @ weight.T + bias for local tensors, in the layouts of ``plans``."""
    with torch._C.DisableTorchFunctionSubclass():  # a `SplitParameter` is its local shard here
        return _Matmul.apply(to_product_dtype(x), weight, bias, plans)


# -- on one rank ------------------------------------------------------------------------------------------------


def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ w.T + bias``: every forward, dgrad and wgrad of a linear layer on one rank.

    A product in another precision belongs here.
    """
    return F.linear(x, w, bias)


def wgrad_product(dy: Tensor, x: Tensor) -> Tensor:
    """Return ``dy.T @ x``, summed over all dims except the last: dy [.., out] and x [.., in] to [out, in]."""
    return product(flat(dy).t(), flat(x).t())


def bias_gradient(dy: Tensor) -> Tensor:
    """Return dy [.., out] summed over all dims except the last: [out]."""
    return flat(dy).sum(0)


def flat(x: Tensor) -> Tensor:
    """Return [.., f] as a matrix."""
    return x.reshape(-1, x.shape[-1])
