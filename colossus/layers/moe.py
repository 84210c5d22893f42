"""Mixture of experts: each token goes through a few of many MLPs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossus.arithmetic import not_a_multiple
from colossus.comm.kept_results import products_without_values, read_once
from colossus.construct.initial_values import Constant, torch_linear
from colossus.context.grid import RankGrid
from colossus.context.groups import AxisGroup
from colossus.error_place import located_error
from colossus.layers.expert_rows import ExpertExchange, inverse, take_rows
from colossus.layers.grouped_matmul import group_sizes, grouped_product
from colossus.layers.layer import Layer, call
from colossus.layers.router import Router, count_choices
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.layout.parameter import Initializer, spec_of
from colossus.layout.redistribute import move
from colossus.registry import MLPS
from colossus.sharded_tensor.regions import unwrap
from colossus.sharded_tensor.tensor import wrap


class MoE(Layer):
    """A mixture of gated experts: the ``top_k`` best of ``num_experts`` for each token, weighted by the router.

    No token is dropped, unless there is a ``capacity``. Every plan computes the same: a token's experts are summed in
    the order of their scores.

    Args:
        ffn_size: features inside an expert. If it divides, the tensor ranks with the same samples split it, else each
            of them computes all.
        shared: features inside an expert that all tokens go through with weight 1, a SwiGLU without biases; None: no
            such expert.
        bias: biases of the router's and of the experts' products (gpt-oss).
        limit, alpha: see `clamped_gate`, which takes the place of SwiGLU where there is a limit.
        router: ``score``, ``norm_topk``, ``scale``, ``groups``, ``top_groups`` and ``bias_update`` of `Router`.
        aux_loss, z_loss: coefficients, see `Router`.
        capacity: an expert takes at most ``capacity * tokens * top_k / num_experts`` of a rank's tokens in a
            microbatch, the first ones; the other tokens lose its share. So the dropped tokens depend on the plan.
        init, out_init: initial values of gate and up, and of down; by default torch's of a linear.

    Shape:
        input and output [.., hidden_size]; the output has the layout of the input. Parameters, by full shapes:
        ``router.weight`` [experts, hidden], ``experts.gate`` and ``experts.up`` [experts, ffn, hidden],
        ``experts.down`` [experts, hidden, ffn]; with ``bias`` ``router.logit_bias`` [experts],
        ``experts.gate_bias`` and ``experts.up_bias`` [experts, ffn], ``experts.down_bias`` [experts, hidden].
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        top_k: int,
        *,
        shared: int | None = None,
        bias: bool = False,
        limit: float | None = None,
        alpha: float = 1.702,
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
        losses = dict(aux_loss=aux_loss, z_loss=z_loss, capacity=capacity)
        options: dict[str, Any] = dict(router or {}, logit_bias=bias, **losses, init=init, dtype=dtype)
        self.router = Router(sizes[0], sizes[2], self.top_k, **options)
        gated: dict[str, Any] = dict(bias=bias, limit=limit, alpha=alpha)
        self.experts = Experts(*sizes, **gated, init=init, out_init=out_init, dtype=dtype)
        self.shared: nn.Module | None = None
        if shared is not None:
            inits: dict[str, Any] = {"init": init, "out_init": out_init, "dtype": dtype}
            self.shared = MLPS.get("swiglu")(sizes[0], shared, False, **inits)

    def forward(self, x: Tensor) -> Tensor:
        local, placement = unwrap(x, self.parallel)
        self.require_batch(local)
        whole, split = self.parallel.regions.whole, self.experts.split_axes
        # ranks that share a token's experts have its activations whole, and addends of its gradient and of its output
        inside, target = replace(whole, grad_partial=split), placement.return_layout
        tokens = move(local, placement.activation, whole, self.context)
        flat = tokens.reshape(-1, tokens.shape[-1])
        weights, experts = self.router(flat)
        weights, flat = move(weights, whole, inside, self.context), move(flat, whole, inside, self.context)
        self.experts.note_collectives(self.experts.group)
        y = mix(
            flat, weights, experts, self.num_experts, self.experts.group, self.experts, drops=self.capacity is not None
        )
        y = y.view(tokens.shape)
        y = wrap(move(y, replace(whole, partial=split), target, self.context), placement.moved(target, y.dim()))
        return y if self.shared is None else y + call(self.shared, x, self.parallel)

    def extra_repr(self) -> str:
        return f"capacity={self.capacity}" if self.capacity is not None else ""


def mix(
    x: Tensor,
    weights: Tensor,
    choices: Tensor,
    num_experts: int,
    group: AxisGroup,
    experts: Callable[[Tensor, Tensor], Tensor],
    *,
    drops: bool = False,
) -> Tensor:
    """Return the outputs of each token's experts, times its weights, summed in the order of its choices.

    Args:
        x: [tokens, hidden], of this rank.
        weights, choices: [tokens, top_k]; an expert has its number in the whole model.
        group: the ranks over which experts are spread.
        experts: rows [rows, hidden] sorted by expert, and the counts of this rank's experts -> the experts' outputs.
        drops: a choice may be ``num_experts``, which stands for no expert.
    """
    top_k = choices.shape[-1]
    exchange = ExpertExchange(choices, num_experts, group) if group.size > 1 else None
    # choices sorted by expert, then by token
    order = choices.reshape(-1).argsort(stable=True)
    place = inverse(order)
    if drops:
        order = order[: num_chosen(choices, num_experts) if exchange is None else exchange.num_chosen]
        place = place.clamp(max=len(order))
    rows = take_rows(x, order // top_k, place.view(-1, top_k), drops)
    if exchange is None:
        out = experts(rows, count_choices(choices, num_experts))
    else:
        rows, counts, back = exchange.to_experts(rows)
        out = back(experts(rows, counts))
    of_choices = take_rows(out, place, order.unsqueeze(-1), drops).view(-1, top_k, x.shape[-1])
    return (of_choices * weights.to(out.dtype).unsqueeze(-1)).sum(1)


def num_chosen(choices: Tensor, num_experts: int) -> int:
    """Return how many choices have an expert."""
    return read_once(lambda: int((choices < num_experts).sum()))


def expert_axes_of(grid: RankGrid, num_experts: int) -> tuple[str, ...]:
    """Return the axes over which experts are spread; ValueError if their number does not divide."""
    over, ranks = grid.expert_axes, grid.size(grid.expert_axes)
    if num_experts % ranks:
        raise located_error(not_a_multiple("num_experts", num_experts, f"parallel.expert = {ranks}", ranks))
    return over


def clamped_gate(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """Return the product of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), of values inside of ``limit``.

    ``gate`` has no lower bound.
    """
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


class Experts(Layer):
    """A rank's experts, down(silu(gate(x)) * up(x)), with stacked parameters; see `MoE` for other gates, and biases.

    Attributes:
        group: the ranks over which experts are spread; each has experts with consecutive numbers.
        split_axes: axes that split the features inside an expert: along them outputs are partial sums.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        *,
        bias: bool = False,
        limit: float | None = None,
        alpha: float = 1.702,
        init: Initializer | None = None,
        out_init: Initializer | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.ffn_size, self.num_experts = hidden_size, ffn_size, num_experts
        self.limit, self.alpha = limit, alpha
        grid, whole = self.context.grid, self.parallel.regions.whole
        over = expert_axes_of(grid, num_experts)
        axes = tuple(axis for axis in grid.axes("tensor") if grid.sizes[axis] > 1 and axis not in whole.batch)
        self.split_axes = axes if ffn_size % grid.size(axes) == 0 else ()
        inner, outer = Layout((over, self.split_axes, ())), Layout((over, (), self.split_axes))
        shape, init = (num_experts, ffn_size, hidden_size), init or torch_linear(hidden_size)
        self.gate = self.make_parameter({"": shape}, inner, init, dtype=dtype)
        self.up = self.make_parameter({"": shape}, inner, init, dtype=dtype)
        down = (num_experts, hidden_size, ffn_size)
        self.down = self.make_parameter({"": down}, outer, out_init or torch_linear(ffn_size), dtype=dtype)
        for parameter in (self.gate, self.up, self.down):
            spec_of(parameter).is_stack = True
            self.decide_gradients(parameter, whole)
        # outputs of the ranks that share an expert are addends: one rank adds the bias, and has its gradient
        own, addend = Layout((over, self.split_axes)), replace(whole, grad_partial=self.split_axes)
        self.gate_bias = self._bias(ffn_size, own, whole, dtype) if bias else None
        self.up_bias = self._bias(ffn_size, own, whole, dtype) if bias else None
        self.down_bias = self._bias(hidden_size, Layout((over, ())), addend, dtype) if bias else None
        self.adds_bias = all(self.context.index(axis) == 0 for axis in self.split_axes)

    def _bias(self, size: int, layout: Layout, use: Activation, dtype: torch.dtype | None) -> nn.Parameter:
        parameter = self.make_parameter({"": (self.num_experts, size)}, layout, Constant(0.0), dtype=dtype)
        spec_of(parameter).is_stack = True
        self.decide_gradients(parameter, use)
        return parameter

    @property
    def group(self) -> AxisGroup:
        return self.context.group(self.context.grid.expert_axes)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' outputs for x [rows, hidden], sorted by expert, ``counts`` [experts] rows each.

        The output is like x, a partial sum over `split_axes`.
        """
        with torch._C.DisableTorchFunctionSubclass():  # a `SplitParameter` is its local shard here
            sizes = group_sizes(counts, x, self.gate)
            gate = grouped_product(x, self.gate, sizes, self.gate_bias)
            up = grouped_product(x, self.up, sizes, self.up_bias)
            inner = F.silu(gate) * up if self.limit is None else clamped_gate(gate, up, self.limit, self.alpha)
            bias = self.down_bias if self.down_bias is None or self.adds_bias else self.down_bias * 0.0
            # an exchange of rows reads this product, and nothing else does
            with products_without_values(self.group.size > 1):
                return grouped_product(inner, self.down, sizes, bias)

    def extra_repr(self) -> str:
        return f"{self.num_experts} x ({self.hidden_size}, {self.ffn_size}), gate and up {spec_of(self.gate).layout}"
