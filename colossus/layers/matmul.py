"""The one distributed matmul: every linear, in every mode, is this with another table.

    y  = reduce_c(gather_a(x) @ gather_b(w).T)
    dx = reduce_a(gather_c(dy) @ gather_b(w))        dw = reduce_b(gather_c(dy).T @ gather_a(x))

Moving operands, multiplying, and the two gradients are separate functions, so that a schedule can call them apart.
In backward the reduction of dx travels while dw is computed, and x is gathered again (rather than kept) while dx is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.comm.collectives import Pending, Ready, is_recorded
from colossus.comm.conjugate import start
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.layers.tensor_mode import MatmulTable
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout, gradient_axes
from colossus.layout.moves import Move, moves

Step = tuple[str, AxisGroup, int, int]


@dataclass(frozen=True)
class Route:
    """Moves of one operand with their groups: ``there`` in forward, ``back`` for its gradient."""

    there: tuple[Step, ...]
    back: tuple[Step, ...]

    @classmethod
    def of(cls, steps: Sequence[Move], context: ParallelContext) -> Route:
        there = [(m.forward, context.group(m.axes), m.dim, m.to_dim) for m in steps if m.forward != "identity"]
        back = []
        for m in reversed(steps):
            dims = (m.to_dim, m.dim) if m.backward == "all_to_all" else (m.dim, m.to_dim)
            if m.backward != "identity":
                back.append((m.backward, context.group(m.axes), *dims))
        return cls(tuple(there), tuple(back))


@dataclass(frozen=True)
class MatmulPlan:
    """One linear called with x in one layout and y in another, for tensors of one number of dims.

    Attributes:
        x, w, y: routes of the operands.
        bias_as_made: whether the bias is added to the product as made, before y is moved.
        weight_axes, bias_axes: over which the gradients stay partial after the backward of this matmul.
    """

    x: Route
    w: Route
    y: Route
    bias_as_made: bool
    weight_axes: tuple[str, ...]
    bias_axes: tuple[str, ...]


def make_plan(
    table: MatmulTable, source: Activation, target: Activation, ndim: int, context: ParallelContext
) -> MatmulPlan:
    """Resolve a table for x stored as ``source`` and y as ``target``."""
    bias_as_made = not table.y.partial
    bias_at = table.y if bias_as_made else target
    return MatmulPlan(
        x=Route.of(moves(source.at(ndim), table.x.at(ndim)), context),
        w=Route.of(moves(table.weight, table.weight_used), context),
        y=Route.of(moves(table.y.at(ndim), target.at(ndim)), context),
        bias_as_made=bias_as_made,
        weight_axes=gradient_axes(table.weight, table.x.at(ndim), table.y.at(ndim)),
        bias_axes=gradient_axes(Layout((bias_at.features,)), bias_at.at(ndim)),
    )


def run(steps: tuple[Step, ...], x: Tensor, *, owned: bool = False) -> Pending:
    """Make the moves; the last one is only started."""
    if not steps:
        return Ready(x)
    for step in steps[:-1]:
        x = start(*_bind(step, x), owned=owned).wait()
        owned = True
    return start(*_bind(steps[-1], x), owned=owned)


def _bind(step: Step, x: Tensor) -> tuple[str, Tensor, AxisGroup, int, int]:
    operation, group, dim, to_dim = step
    return operation, x, group, dim, to_dim


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
        x_used = run(plan.x.there, x).wait()
        w_used = run(plan.w.there, weight).wait()
        y = F.linear(x_used, w_used, bias if plan.bias_as_made else None)
        y = run(plan.y.there, y, owned=True).wait()
        if bias is not None and not plan.bias_as_made:
            y = y + bias if is_recorded() else y.add_(bias)
        ctx.save_for_backward(x, weight)
        ctx.plan = plan
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        plan: MatmulPlan = ctx.plan
        x, weight = ctx.saved_tensors
        needs_x, needs_w, needs_b, _ = ctx.needs_input_grad
        db = dw = dx = None
        if needs_b and ctx.has_bias and not plan.bias_as_made:
            db = bias_gradient(dy)
        dy = run(plan.y.back, dy).wait()
        x_coming = run(plan.x.there, x) if needs_w else None
        if needs_x:
            w_used = run(plan.w.there, weight).wait()
            dx = run(plan.x.back, input_gradient(dy, w_used), owned=True)
        if needs_w:
            assert x_coming is not None
            dw = run(plan.w.back, weight_gradient(dy, x_coming.wait()), owned=True)
        if needs_b and ctx.has_bias and plan.bias_as_made:
            db = bias_gradient(dy)
        return dx.wait() if dx else None, dw.wait() if dw else None, db, None


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, plan: MatmulPlan) -> Tensor:
    """y = x @ weight.T + bias, all in their stored layouts."""
    return _Matmul.apply(x, weight, bias, plan)
