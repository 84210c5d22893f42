"""Attention heads: from features to heads and back, and key/value heads that are fewer than the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.comm.pending import Pending, Ready
from colossus.error_place import located_error
from colossus.layers.layer import Layer
from colossus.layers.linear import MatmulLayer
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.layout.parameter import Initializer
from colossus.layout.redistribute import move
from colossus.sharded_tensor.regions import unwrap
from colossus.sharded_tensor.tensor import ShardedTensor, wrap
from colossus.tensor_parallel.dtypes import to_product_dtype
from colossus.tensor_parallel.matmul import MatmulPlans
from colossus.tensor_parallel.mode import MatmulSharding
from colossus.tensor_parallel.move_plan import MovePlan


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return [.., tokens, heads * head_dim] as [.., heads, tokens, head_dim], for a user's own attention.

    If features are split, as by ``Linear(split="column")``, a rank has its heads. Functions that work on each head by
    itself are right on them, such as ``F.scaled_dot_product_attention`` with a mask in the whole layout. The result is
    ``x.unflatten(-1, (heads, -1)).transpose(-3, -2)``, with the checks below.

    Args:
        heads: heads of all ranks; keys and values may have fewer than queries (``enable_gqa=True``).

    Raises:
        ValueError: heads do not divide the features or over the ranks, or tokens are split.
    """
    features, ways = x.shape[-1], 1
    if isinstance(x, ShardedTensor):
        activation = x.placement.activation
        if x.placement.place("tokens") is not None:
            raise located_error(
                f"split_heads: tokens are split ({activation}), but an attention needs all of them. Between blocks "
                f'colossus.layers.Linear(split="column") gathers them; under parallel.sequence use '
                f"colossus.layers.Attention, which passes keys and values between the ranks"
            )
        ways = x.placement.parallel.context.size(activation.features) if activation.features else 1
    if heads < 1 or features % heads or heads % ways:
        raise located_error(
            f"split_heads: heads = {heads} must divide {features} features, and over the {ways} ranks that "
            f"split them, since a head cannot be split; or call colossus.layers.to_whole(x) first"
        )
    return x.unflatten(-1, (heads, features // heads)).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """Return [.., heads, tokens, head_dim] as [.., tokens, heads * head_dim], the inverse of `split_heads`.

    A rank's heads become split features, which ``Linear(split="row")`` takes.
    """
    return x.transpose(-3, -2).flatten(-2)


class ReplicatedKV(Layer):
    """The query, key and value of an attention, [.., features] each, with fewer key/value heads than ranks.

    Every rank stores the weights of all key/value heads, and multiplies by those of the head to which its queries
    attend. The gradients are summed over these ranks as those of any replicated parameter. x is moved once for all
    three products, and the moved x is kept for their backward.

    Args:
        outputs: out_features of ``query``, ``key`` and ``value``.
        num_kv_heads: divides the ranks that split heads.

    Shape:
        input [.., in_features]; output a tuple of three, split by heads over these ranks: each rank has one head of key
        and value.

    Raises:
        ValueError: in_features do not divide over the ranks of the mode.
    """

    is_fused = True

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, int],
        num_kv_heads: int,
        bias: bool = True,
        *,
        init: Initializer | None = None,
        bias_init: Initializer | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        shardings = self.parallel.shardings
        assert shardings is not None, "heads are split"
        self.in_features, self.outputs, self.num_kv_heads = in_features, dict(outputs), num_kv_heads
        axes = shardings.regions.inner.features
        copies = shardings.ways(axes) // num_kv_heads
        computed = {name: size if name == "query" else size * copies for name, size in outputs.items()}
        chosen = self.choose_sharding("column", in_features, computed)
        assert chosen is not None
        self.x_layout = chosen.x
        head = self.context.index(axes) // copies
        inits: dict[str, Any] = dict(init=init, bias_init=bias_init, dtype=dtype)
        for name, size in outputs.items():
            rows = None if name == "query" else (head * size // num_kv_heads, (head + 1) * size // num_kv_heads)
            self.add_module(name, _Projection(in_features, size, chosen, rows, bias, **inits))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        local, placement = unwrap(x, self.parallel)
        try:
            moved = move(to_product_dtype(local), placement.activation, self.x_layout, self.parallel.context)
            marked = wrap(moved, placement.moved(self.x_layout, moved.dim()))
            return tuple(getattr(self, name)(marked) for name in self.outputs)
        except (ValueError, RuntimeError) as error:
            self.name_error(error, local, placement.activation, self.in_features)
            raise

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.outputs}, num_kv_heads={self.num_kv_heads}"


class _Projection(MatmulLayer):
    """One of the three products; this rank multiplies by ``rows`` of a replicated weight."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sharding: MatmulSharding,
        rows: tuple[int, int] | None,
        bias: bool,
        **inits: Any,
    ) -> None:
        super().__init__()
        self.out_features, self.rows = out_features, rows
        self.sharding = sharding if rows is None else _replicated_outputs(sharding)
        bias_layout = Layout((sharding.y.features if rows is None else (),))
        self.make_weights(in_features, {"": out_features}, bias, bias_layout, **inits)

    def forward(self, x: Tensor) -> Tensor:
        local, placement = unwrap(x, self.parallel)
        bias = self.bias if self.bias is None or self.rows is None else self.bias[slice(*self.rows)]
        inner = self.parallel.regions.inner
        y = self.multiply(local, bias, placement.activation, inner)
        return wrap(y, placement.moved(inner, y.dim()))

    def make_plans(self, source: Activation, target: Activation, ndim: int, rows: Sequence[int] = ()) -> MatmulPlans:
        plans = super().make_plans(source, target, ndim, rows)
        if self.rows is None:
            return plans
        before, behind = self.rows[0], self.out_features - self.rows[1]
        forward = (*plans.w.forward, _Pad(-before, -behind))
        return replace(plans, w=MovePlan(forward, (_Pad(before, behind), *plans.w.backward)))


def _replicated_outputs(sharding: MatmulSharding) -> MatmulSharding:
    """Return a column linear's sharding with weight rows whole on all ranks that split the features of y."""

    def without(layout: Layout) -> Layout:
        rows = tuple(axis for axis in layout.dims[0] if axis not in sharding.y.features)
        return replace(layout, dims=(rows, *layout.dims[1:]))

    return replace(sharding, weight=without(sharding.weight), gathered_weight=without(sharding.gathered_weight))


@dataclass(frozen=True)
class _Pad:
    """A move of a weight that adds zeros before and behind its rows, or, for negative numbers, drops rows."""

    before: int
    behind: int

    def start(self, x: Tensor, *, owned: bool) -> Pending:
        return Ready(F.pad(x, (0, 0, self.before, self.behind)))
