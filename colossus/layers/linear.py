"""Linear layers: on their own or in column/row pairs, with one output or several from one input."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from colossus.construct.initial_values import torch_linear
from colossus.error_place import located_error
from colossus.layers.layer import Layer
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.layout.parameter import Initializer, rows_of
from colossus.sharded_tensor.regions import move, unwrap
from colossus.sharded_tensor.tensor import wrap
from colossus.tensor_parallel.choose_sharding import unsharded
from colossus.tensor_parallel.matmul import MatmulPlans, matmul, matmul_plans, product
from colossus.tensor_parallel.mode import MatmulSharding

SPLITS = (None, "column", "row")


class Linear(Layer):
    """``torch.nn.Linear`` whose weight may be split over the tensor ranks.

    With ``split=None`` it takes and returns all features, as torch's does, and is right anywhere in a model: how its
    weight is split is chosen by counted bytes, and where its sizes do not divide every rank computes all of it. A
    column/row pair saves the traffic between its two: ``split="column"`` returns features that stay split, a
    `ShardedTensor`, on which element-by-element functions work and which ``split="row"`` takes.

    Args:
        in_features: size of the last dim of the input.
        out_features: size of the last dim of the output; a mapping name -> size gives several outputs from one input,
            each its own logical parameter (``weight`` of ``query``, ...), with one matmul.
        bias: whether to add one.
        device: accepted as torch does, and ignored: parameters are made on the device of the context.
        split: None, ``"column"`` or ``"row"``.
        init, bias_init: see `colossus.layers.init`; by default torch's distribution with the full fan-in.

    Shape:
        input [.., in_features]; output [.., out_features], or a tuple of these. Between a pair the last dim is divided
        by the number of tensor ranks.

    Raises:
        ValueError: when a pair's sizes do not divide over the tensor ranks.
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
        fused = isinstance(out_features, Mapping)
        outputs = out_features if isinstance(out_features, Mapping) else {"": out_features}
        self.outputs: dict[str, int] = {name: operator.index(size) for name, size in outputs.items()}
        self.in_features = operator.index(in_features)
        self.out_features = sum(self.outputs.values())
        self.split = split
        self.is_fused = fused
        self.sharding = self._choose()
        layout = self.sharding.weight if self.sharding else Layout.whole(2)
        features = self.sharding.y.features if self.sharding else ()
        self.weight = self.make_parameter(
            {name: (out, in_features) for name, out in self.outputs.items()},
            layout,
            init or torch_linear(in_features),
            dtype=dtype,
        )
        self.bias = (
            self.make_parameter(
                {name: (out,) for name, out in self.outputs.items()},
                Layout((features,)),
                bias_init or torch_linear(in_features),
                dtype=dtype,
            )
            if bias
            else None
        )
        x, y = (self.sharding.x, self.sharding.y) if self.sharding else (self.parallel.regions.whole,) * 2
        self.decide_gradients(self.weight, x, y)
        self.decide_gradients(self.bias, y)
        ways = self.context.size(features) if features else 1
        self.local_outputs = [out // ways for out in self.outputs.values()]
        self._move_plans: dict[tuple[Activation, Activation, int], MatmulPlans] = {}

    def _choose(self) -> MatmulSharding | None:
        """The sharding, by sizes and counted bytes; None without tensor parallelism."""
        shardings = self.parallel.shardings
        if shardings is None:
            return None
        chosen = shardings.choose(self.split, self.in_features, self.outputs)
        if isinstance(chosen, MatmulSharding):
            return chosen
        if self.split is None:
            return unsharded(shardings.regions)
        raise located_error(
            f"Linear({self.in_features}, {self.out_features}, split={self.split!r}) under parallel.tensor.mode = "
            f"{self.parallel.mode.name}: {'; '.join(map(str, chosen))}; or take split=None"
        )

    def forward(self, x: Tensor) -> Any:
        if self.sharding is None:
            return self._outputs(product(x, self.weight, self.bias))
        local, at = unwrap(x, self.parallel)
        self.require_batch(local)
        target = self.parallel.regions.inner if self.split == "column" else at.return_layout
        y = self._product(local, at.activation, target)
        placement = at.moved(target, local.dim())
        if not self.is_fused:
            return wrap(y, placement)
        return tuple(wrap(output, placement) for output in y)

    def _product(self, x: Tensor, source: Activation, target: Activation) -> Any:
        """Of a plain local tensor laid out as ``source``; what it gives is laid out as ``target``."""
        key = (source, target, x.dim())
        plans = self._move_plans.get(key)
        if plans is None:
            plans = self._move_plans[key] = self._make_plans(*key)
        try:
            y = matmul(x, self.weight, self.bias, plans)
        except (ValueError, RuntimeError) as error:
            self.name_error(error, x, source, self.in_features)
            raise
        if not self.is_fused:
            return y
        reached = self._matmul_target(target)
        return tuple(move(output, reached, target, self.parallel) for output in self._outputs(y))

    def _matmul_target(self, target: Activation) -> Activation:
        """The layout to which the matmul moves y: over features, several outputs are moved one by one after it."""
        assert self.sharding is not None
        one_by_one = self.is_fused and self.sharding.y.features != target.features
        return self.sharding.y if one_by_one else target

    def _local_rows(self) -> list[int]:
        """Of a fused linear, the rows of each output in the local weight."""
        return [stop - start for start, stop in rows_of(self.weight)] if self.is_fused else []

    def _make_plans(self, source: Activation, target: Activation, ndim: int) -> MatmulPlans:
        assert self.sharding is not None
        self.check_stored(self.weight, self.sharding.weight)
        return matmul_plans(
            self.sharding,
            source,
            self._matmul_target(target),
            ndim,
            self.context,
            self.parallel.weights,
            rows=self._local_rows(),
        )

    def _outputs(self, y: Tensor) -> Any:
        return y.split_with_sizes(self.local_outputs, -1) if self.is_fused else y

    def extra_repr(self) -> str:
        outputs = self.outputs[""] if not self.is_fused else self.outputs
        where = f", weight {self.sharding.weight}" if self.sharding else ""
        split = f", split={self.split!r}" if self.split else ""
        return f"{self.in_features}, {outputs}, bias={self.bias is not None}{split}{where}"
