"""Embeddings: a matmul on one-hot rows, the vocabulary split as the output features of a column linear."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.layers.init import Normal
from colossus.layers.layer import Layer
from colossus.layers.matmul import Route, Step, run
from colossus.layers.sharded import unwrap, wrap
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout, gradient_axes
from colossus.layout.moves import moves
from colossus.layout.parameter import Initializer, spec_of


class Embedding(Layer):
    """``torch.nn.Embedding`` with the vocabulary split over the tensor ranks.

    A vocabulary that does not divide is padded on the last ranks; the padding is never looked up, gets no gradient and
    is no part of the logical parameter.

    Shape:
        ids [..] (whole on every tensor rank), output [.., embedding_dim].

    Raises:
        ValueError: for ids outside the vocabulary (checked on CPU; a split table would answer zeros in silence).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        init: Initializer | None = None,
    ) -> None:
        super().__init__()
        if padding_idx is not None and padding_idx < 0:
            padding_idx += num_embeddings
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.table = self.plan.mode.linear("column", self.plan.regions) if self.is_split else None
        layout = self.table.weight if self.table else Layout.whole(2)
        shape = (num_embeddings, embedding_dim)
        self.weight = self.make_parameter({"": shape}, layout, init or Normal(1.0), dtype=dtype)
        (self.start, self.stop), _ = layout.box(shape, self.plan.sizes, self.context.coordinates)
        self._routes: dict[tuple[Activation, int], Route] = {}
        if self.table is None:
            self.record_uses(self.plan.regions.user, 3)

    def forward(self, ids: Tensor) -> Tensor:
        user = self.plan.regions.user
        return wrap(self.apply_local(ids, user), user, user, self.plan)

    def apply_local(self, ids: Tensor, target: Activation) -> Tensor:
        """The rows of ``ids`` as a plain local tensor laid out as ``target``."""
        if self.table is None:
            return F.embedding(ids, self.weight, self.padding_idx)
        check_range(ids, self.num_embeddings, f"{self.title}: ids")
        route = self._routes.get((target, ids.dim()))
        if route is None:
            route = self._routes[target, ids.dim()] = self._make_route(target, ids.dim() + 1)
        return _Lookup.apply(ids, self.weight, self.start, self.stop, self.padding_idx, route.there, route.back)

    def _make_route(self, target: Activation, ndim: int) -> Route:
        assert self.table is not None
        made = Activation(
            batch=self.plan.regions.user.batch, tokens=self.plan.regions.user.tokens, partial=self.table.y.features
        )
        spec = spec_of(self.weight)
        assert spec is not None
        spec.record(gradient_axes(spec.layout, made.at(ndim)))
        return Route.of(moves(made.at(ndim), target.at(ndim)), self.context)

    def extra_repr(self) -> str:
        held = f", rows {self.start}..{self.stop} on this rank" if self.table else ""
        return f"{self.num_embeddings}, {self.embedding_dim}{held}"


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        weight: Tensor,
        start: int,
        stop: int,
        padding_idx: int | None,
        there: tuple[Step, ...],
        back: tuple[Step, ...],
    ) -> Tensor:
        elsewhere = (ids < start) | (ids >= stop)
        local = (ids - start).masked_fill_(elsewhere, 0)
        if padding_idx is not None:
            ctx.no_gradient = ids == padding_idx
        out = F.embedding(local, weight).masked_fill_(elsewhere.unsqueeze(-1), 0.0)
        ctx.save_for_backward(local, elsewhere)
        ctx.num_rows, ctx.back, ctx.padding_idx = weight.shape[0], back, padding_idx
        return run(there, out, owned=True).wait()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        local, elsewhere = ctx.saved_tensors
        if ctx.padding_idx is not None:
            elsewhere = elsewhere | ctx.no_gradient
        dy = run(ctx.back, dy).wait().masked_fill(elsewhere.unsqueeze(-1), 0.0)
        dw = torch.ops.aten.embedding_dense_backward(dy, local, ctx.num_rows, -1, False)
        return None, dw, None, None, None, None, None


class PositionEmbedding(Layer):
    """Learned positions, added to an activation: x [batch, tokens, dim] + weight[tokens].

    Raises:
        ValueError: for more tokens than positions.
    """

    def __init__(
        self,
        num_positions: int,
        embedding_dim: int,
        *,
        init: Initializer | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_positions, self.embedding_dim = num_positions, embedding_dim
        shape = (num_positions, embedding_dim)
        self.weight = self.make_parameter({"": shape}, Layout.whole(2), init or Normal(0.02), dtype=dtype)
        self._seen: set[Activation] = set()

    def forward(self, x: Tensor) -> Tensor:
        local, activation, home = unwrap(x, self.plan)
        return wrap(self.apply_local(local, activation), activation, home, self.plan)

    def apply_local(self, x: Tensor, activation: Activation) -> Tensor:
        if activation not in self._seen:
            self.record_uses(activation, x.dim())
            self._seen.add(activation)
        count, start = x.shape[-2], 0
        if activation.tokens:
            start = self.context.index(activation.tokens) * count
        total = count * self.context.size(activation.tokens) if activation.tokens else count
        if total > self.num_positions:
            raise ValueError(f"{self.title}: a sequence of {total} tokens, but only {self.num_positions} positions")
        return x + self.weight[start : start + count]


def check_range(ids: Tensor, size: int, what: str) -> None:
    """On CPU, that all ids are in 0..size-1 (on an accelerator the check would wait for the device)."""
    if ids.device.type == "cpu" and ids.numel():
        low, high = torch.aminmax(ids)
        if int(low) < 0 or int(high) >= size:
            raise ValueError(f"{what} range over {int(low)}..{int(high)}, outside the vocabulary 0..{size - 1}")
