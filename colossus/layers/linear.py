"""Layers that multiply by a weight: linears, alone or in column/row pairs, with one output or several."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colossus.construct.initial_values import torch_linear
from colossus.error_place import located_error
from colossus.layers.layer import Layer
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.layout.parameter import Initializer, rows_of
from colossus.layout.redistribute import move
from colossus.sharded_tensor.regions import unwrap
from colossus.sharded_tensor.tensor import wrap
from colossus.tensor_parallel.dtypes import to_product_dtype
from colossus.tensor_parallel.matmul import MatmulPlans, matmul, matmul_plans, product, tiles_of
from colossus.tensor_parallel.mode import MatmulSharding
from colossus.tensor_parallel.move_plan import MovePlan

SPLITS = (None, "column", "row")
STAYS = MovePlan((), ())


class MatmulLayer(Layer):
    """Base of layers that multiply by one weight [out, in], split by ``sharding``; None without tensor parallelism."""

    is_reproducible = True

    weight: nn.Parameter
    bias: nn.Parameter | None
    sharding: MatmulSharding | None

    def make_weights(
        self,
        in_features: int,
        outputs: Mapping[str, int],
        bias: bool,
        bias_layout: Layout,
        *,
        init: Initializer | None,
        bias_init: Initializer | None,
        dtype: torch.dtype | None,
        tied: nn.Parameter | None = None,
    ) -> None:
        """Make weight and bias, by default with torch's initial values.

        Args:
            outputs: name -> out_features; a single output is named "".
            tied: the weight to share; then none is made.
        """
        self.in_features = in_features
        default, sharding, whole = torch_linear(in_features), self.sharding, self.parallel.regions.whole
        x, y = (sharding.x, sharding.y) if sharding else (whole, whole)
        if tied is None:
            shapes = {name: (out, in_features) for name, out in outputs.items()}
            layout = sharding.weight if sharding else Layout.whole(2)
            self.weight = self.make_parameter(shapes, layout, init or default, dtype=dtype)
            self.decide_gradients(self.weight, x, y)
        else:
            self.weight = tied
        sizes = {name: (out,) for name, out in outputs.items()}
        self.bias = self.make_parameter(sizes, bias_layout, bias_init or default, dtype=dtype) if bias else None
        self.decide_gradients(self.bias, y)
        self._move_plans: dict[tuple[Activation, Activation, int], MatmulPlans] = {}

    def multiply(self, x: Tensor, bias: Tensor | None, source: Activation, target: Activation) -> Tensor:
        """Multiply a plain local x in the layout ``source``; the product has the layout ``target``."""
        plans = self.plans_of(source, target, x.dim())
        try:
            return matmul(x, self.weight, bias, plans)
        except (ValueError, RuntimeError) as error:
            self.name_error(error, x, source, self.in_features)
            raise

    def whole_product(self, x: Tensor) -> Tensor:
        """Return the product of a plain x without tensor parallelism."""
        if not self.context.options.reproducible:
            return product(x, self.weight, self.bias)
        return matmul(x, self.weight, self.bias, self.whole_plans())

    def whole_plans(self) -> MatmulPlans:
        """Return plans without moves."""
        tiles = tiles_of(self.context, Layout.whole(2), [stop - start for start, stop in rows_of(self.weight)])
        return MatmulPlans(STAYS, STAYS, STAYS, (), self.parallel.weights, keep=True, adds_bias=True, tiles=tiles)

    def plans_of(self, source: Activation, target: Activation, ndim: int) -> MatmulPlans:
        """Return the plans of `multiply`, made once."""
        key = (source, target, ndim)
        plans = self._move_plans.get(key)
        if plans is None:
            plans = self._move_plans[key] = self.make_plans(*key)
        return plans

    def make_plans(self, source: Activation, target: Activation, ndim: int, rows: Sequence[int] = ()) -> MatmulPlans:
        """Return the plans of `colossus.tensor_parallel.matmul.matmul_plans` for this layer's weight."""
        assert self.sharding is not None
        self.check_stored(self.weight, self.sharding.weight)
        weights = self.parallel.weights
        return matmul_plans(self.sharding, source, target, ndim, self.context, weights, rows=rows)


class Linear(MatmulLayer):
    """``torch.nn.Linear`` whose weight may be split over the tensor ranks.

    With ``split=None`` it takes and returns all features, as torch's does, and is right anywhere in a model: the split
    of its weight is chosen by counted bytes, and where its sizes do not divide every rank computes all of it. A
    column/row pair saves the traffic between the two: ``split="column"`` returns features that stay split, a
    `ShardedTensor`, on which element-by-element functions work and which ``split="row"`` takes.

    Args:
        in_features: size of the last dim of the input.
        out_features: size of the last dim of the output; a mapping name -> size gives several outputs from one input,
            each its own logical parameter (``weight`` of ``query``, ...), with one matmul.
        bias: add a bias.
        device: accepted as torch does, and ignored: parameters are made on the device of the context.
        split: None, ``"column"`` or ``"row"``.
        init, bias_init: see `colossus.layers.init`; by default torch's distribution with the full fan-in.

    Shape:
        input [.., in_features]; output [.., out_features], or a tuple of these. Between a pair the last dim is divided
        by the number of tensor ranks.

    Raises:
        ValueError: a pair's sizes do not divide over the tensor ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        split: str | None = None,
        init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ) -> None:
        super().__init__()
        if split not in SPLITS:
            raise located_error(f"Linear: split = {split!r}; use None (alone), 'column' or 'row'")
        outputs = out_features if isinstance(out_features, Mapping) else {"": out_features}
        self.outputs: dict[str, int] = {name: operator.index(size) for name, size in outputs.items()}
        self.in_features = operator.index(in_features)
        self.out_features = sum(self.outputs.values())
        self.split = split
        self.is_fused = isinstance(out_features, Mapping)
        self.shared_input: SharedInput | None = None
        self.sharding = self.choose_sharding(split, self.in_features, self.outputs)
        features = self.sharding.y.features if self.sharding else ()
        inits: dict[str, Any] = dict(init=init, bias_init=bias_init, dtype=dtype)
        self.make_weights(self.in_features, self.outputs, bias, Layout((features,)), **inits)
        ways = self.context.size(features) if features else 1
        self.local_outputs = [out // ways for out in self.outputs.values()]

    def forward(self, input: Tensor) -> Any:
        local, placement = unwrap(input, self.parallel)
        if self.sharding is None:
            y = self._outputs(self.whole_product(local))
            return tuple(wrap(output, placement) for output in y) if self.is_fused else wrap(y, placement)
        self.require_batch(local)
        target = self.parallel.regions.inner if self.split == "column" else placement.return_layout
        source = placement.activation
        if self.shared_input is not None and input.requires_grad and torch.is_grad_enabled():
            local, source = self.shared_input.take(input, local, source, self), self.sharding.x
        y = self._product(local, source, target)
        out_placement = placement.moved(target, local.dim())
        if not self.is_fused:
            return wrap(y, out_placement)
        return tuple(wrap(output, out_placement) for output in y)

    def _product(self, x: Tensor, source: Activation, target: Activation) -> Any:
        """Multiply a plain local tensor in the layout ``source``; the outputs have the layout ``target``."""
        if not self.is_fused:
            return self.multiply(x, self.bias, source, target)
        assert self.sharding is not None
        # over features, several outputs are moved one by one after the matmul
        reached = self.sharding.y if self.sharding.y.features != target.features else target
        y = self.multiply(x, self.bias, source, reached)
        return tuple(move(output, reached, target, self.context) for output in self._outputs(y))

    def make_plans(self, source: Activation, target: Activation, ndim: int, rows: Sequence[int] = ()) -> MatmulPlans:
        rows = [stop - start for start, stop in rows_of(self.weight)] if self.is_fused else rows
        return super().make_plans(source, target, ndim, rows)

    def _outputs(self, y: Tensor) -> Any:
        return y.split_with_sizes(self.local_outputs, -1) if self.is_fused else y

    def extra_repr(self) -> str:
        outputs = self.outputs[""] if not self.is_fused else self.outputs
        where = f", weight {self.sharding.weight}" if self.sharding else ""
        split = f", split={self.split!r}" if self.split else ""
        return f"{self.in_features}, {outputs}, bias={self.bias is not None}{split}{where}"


class SharedInput:
    """A cache for linears of one input: x moves once to where they multiply, and so does the sum of their gradients.

    A fused linear does that by itself. Without the cache, separate linears (the query, key and value of a model that
    has three) would each move x, and sum its gradient over the ranks, on their own.
    """

    def __init__(self, num_linears: int) -> None:
        self._num_linears, self._num_left = num_linears, 0
        self._x: Tensor | None = None
        self._moved: Tensor | None = None
        self._version = -1

    def take(self, x: Tensor, local: Tensor, source: Activation, linear: Linear) -> Tensor:
        """Return ``local``, the rank's part of x, in the layout of the product, for all linears of one input."""
        assert linear.sharding is not None
        if self._moved is None or self._x is not x or self._version != x._version:
            self._moved = move(to_product_dtype(local), source, linear.sharding.x, linear.parallel.context)
            self._x, self._version, self._num_left = x, x._version, self._num_linears
        moved = self._moved
        self._num_left -= 1
        if self._num_left <= 0:
            self._x = self._moved = None
        return moved


def share_input(linears: Sequence[Linear]) -> None:
    """Let linears with the same input tensor share its move, if they multiply x in one layout."""
    by_layout: dict[Activation, list[Linear]] = {}
    for linear in linears:
        # the sum of several products' gradients over ranks has other bits than the sum of their sums
        if linear.sharding is not None and linear.split == "column" and not linear.context.options.reproducible:
            by_layout.setdefault(linear.sharding.x, []).append(linear)
    for group in by_layout.values():
        if len(group) > 1:
            shared = SharedInput(len(group))
            for linear in group:
                linear.shared_input = shared
