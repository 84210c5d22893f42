"""Mixture of experts: each token goes through a few of many MLPs."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossus.construct.initial_values import torch_linear
from colossus.layers.grouped_matmul import group_sizes, grouped_product
from colossus.layers.layer import Layer, call
from colossus.layers.router import Router, count_choices
from colossus.layout.layout import Layout
from colossus.layout.parameter import Initializer, spec_of
from colossus.registry import MLPS
from colossus.sharded_tensor.regions import move, unwrap
from colossus.sharded_tensor.tensor import wrap


class MoE(Layer):
    """The ``top_k`` best of ``num_experts`` SwiGLU experts for each token (token choice), added up by the router's
    weights; no token is dropped.

    Every plan computes the same: a token's experts are added in the order of their scores.

    Args:
        ffn_size: features inside of an expert. Split over the tensor ranks that hold the same samples, where it
            divides, else each of them computes all.
        shared: features inside of an expert that all tokens go through with weight 1; None: there is none.
        router: ``score``, ``norm_topk`` and ``bias_update`` of `Router`.
        aux_loss, z_loss: coefficients, as of `Router`.
        capacity: an expert takes no more than ``capacity * tokens * top_k / num_experts`` of a rank's tokens in a
            microbatch, the first ones; of the others its share is left out. So what is dropped depends on the plan.
        init, out_init: of gate and up, and of down; by default torch's of a linear.

    Shape:
        input and output [.., hidden_size]; the output has the layout of the input. Parameters, by full shapes:
        ``router.weight`` [experts, hidden], ``experts.gate`` and ``experts.up`` [experts, ffn, hidden],
        ``experts.down`` [experts, hidden, ffn].
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        top_k: int,
        *,
        shared: int | None = None,
        router: Mapping[str, Any] | None = None,
        aux_loss: float = 0.0,
        z_loss: float = 0.0,
        capacity: float | None = None,
        init: Initializer | None = None,
        out_init: Initializer | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = tuple(map(operator.index, (hidden_size, ffn_size, num_experts)))
        self.num_experts, self.top_k, self.capacity = sizes[2], operator.index(top_k), capacity
        options: dict[str, Any] = dict(router or {}, aux_loss=aux_loss, z_loss=z_loss, init=init, dtype=dtype)
        self.router = Router(sizes[0], sizes[2], self.top_k, **options)
        self.experts = Experts(*sizes, init=init, out_init=out_init, dtype=dtype)
        self.shared: nn.Module | None = None
        if shared is not None:
            inits: dict[str, Any] = {"init": init, "out_init": out_init, "dtype": dtype}
            self.shared = MLPS.get("swiglu")(sizes[0], shared, False, **inits)

    def forward(self, x: Tensor) -> Tensor:
        local, at = unwrap(x, self.parallel)
        self.require_batch(local)
        whole, split = self.parallel.regions.whole, self.experts.split_axes
        # ranks that share a token's experts hold its activations whole, and addends of its gradient and of its output
        inside, target = replace(whole, grad_partial=split), at.return_layout
        tokens = move(local, at.activation, whole, self.parallel)
        flat = tokens.reshape(-1, tokens.shape[-1])
        weights, experts = self.router(flat)
        weights, flat = move(weights, whole, inside, self.parallel), move(flat, whole, inside, self.parallel)
        y = self._mix(flat, weights, experts).view(tokens.shape)
        y = wrap(move(y, replace(whole, partial=split), target, self.parallel), at.moved(target, y.dim()))
        return y if self.shared is None else y + call(self.shared, x, self.parallel)

    def _mix(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The experts' outputs for x [tokens, hidden], added up; weights and experts are [tokens, top_k]."""
        num_choices = experts.numel()
        if self.capacity is not None:
            experts = _within_capacity(experts, self.num_experts, int(self.capacity * num_choices / self.num_experts))
        counts = count_choices(experts, self.num_experts + 1)[: self.num_experts]
        # choices by expert; of one expert by token
        order = experts.reshape(-1).argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(num_choices, device=order.device))
        drops = self.capacity is not None
        if drops:
            order = order[: int(counts.sum())]
            place = place.clamp(max=len(order))
        rows = take_rows(x, order // self.top_k, place.view(-1, self.top_k), drops)
        out = self.experts(rows, counts)
        of_choices = take_rows(out, place, order.unsqueeze(-1), drops).view(-1, self.top_k, x.shape[-1])
        return (of_choices * weights.to(out.dtype).unsqueeze(-1)).sum(1)

    def extra_repr(self) -> str:
        return f"capacity={self.capacity}" if self.capacity is not None else ""


class Experts(Layer):
    """down(silu(gate(x)) * up(x)) of every expert; the parameters of all are stacked.

    Attributes:
        split_axes: axes that split the features inside of an expert: along them outputs are partial sums.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        *,
        init: Initializer | None = None,
        out_init: Initializer | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.ffn_size, self.num_experts = hidden_size, ffn_size, num_experts
        grid, whole = self.context.grid, self.parallel.regions.whole
        axes = tuple(axis for axis in grid.axes("tensor") if grid.sizes[axis] > 1 and axis not in whole.batch)
        self.split_axes = axes if ffn_size % grid.size(axes) == 0 else ()
        inner, outer = Layout(((), self.split_axes, ())), Layout(((), (), self.split_axes))
        shape, init = (num_experts, ffn_size, hidden_size), init or torch_linear(hidden_size)
        self.gate = self.make_parameter({"": shape}, inner, init, dtype=dtype)
        self.up = self.make_parameter({"": shape}, inner, init, dtype=dtype)
        down = (num_experts, hidden_size, ffn_size)
        self.down = self.make_parameter({"": down}, outer, out_init or torch_linear(ffn_size), dtype=dtype)
        for parameter in (self.gate, self.up, self.down):
            self.decide_gradients(parameter, whole)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [rows, hidden], by expert: ``counts`` [experts] of each. Output as x, a partial sum over `split_axes`."""
        with torch._C.DisableTorchFunctionSubclass():  # a `SplitParameter` is here what it is
            sizes = group_sizes(counts, x, self.gate)
            gate, up = grouped_product(x, self.gate, sizes), grouped_product(x, self.up, sizes)
            return grouped_product(F.silu(gate) * up, self.down, sizes)

    def extra_repr(self) -> str:
        return f"{self.num_experts} x ({self.hidden_size}, {self.ffn_size}), gate and up {spec_of(self.gate).layout}"


def _within_capacity(experts: Tensor, num_experts: int, limit: int) -> Tensor:
    """The choices [tokens, top_k]; those behind the first ``limit`` of an expert are ``num_experts``: of nobody."""
    chosen = F.one_hot(experts.reshape(-1), num_experts)
    rank = (chosen.cumsum(0) * chosen).sum(-1).view_as(experts)
    return experts.masked_fill(rank > limit, num_experts)


class _TakeRows(torch.autograd.Function):
    """x [n, h] -> x[index] [m, h]; with ``pads`` a row of index n is zero.

    The gradient is taken as the value is, with ``sources`` [n, c]: of each row of x its places in the output. The sum
    over them has an order, which a scatter-add has not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, sources: Tensor, pads: bool) -> Tensor:
        ctx.save_for_backward(sources)
        ctx.pads = pads
        return (F.pad(x, (0, 0, 0, 1)) if pads else x)[index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (sources,) = ctx.saved_tensors
        dy = F.pad(grads[0], (0, 0, 0, 1)) if ctx.pads else grads[0]
        return dy[sources].sum(1), None, None, None


def take_rows(x: Tensor, index: Tensor, sources: Tensor, pads: bool = False) -> Tensor:
    """``x[index]``, whose gradient is summed in a fixed order: see `_TakeRows`."""
    out: Tensor = _TakeRows.apply(x, index, sources, pads)
    return out
