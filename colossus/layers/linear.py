"""Linear, alone or in column/row pairs, with one output or several from one input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.layers.choice import whole
from colossus.layers.coalesced import Member
from colossus.layers.init import torch_linear
from colossus.layers.layer import Layer
from colossus.layers.matmul import MatmulPlan, make_plan, matmul
from colossus.layers.route import Route
from colossus.layers.sharded import move, one_sample, unwrap, wrap
from colossus.layers.tensor_mode import MatmulTable
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.layout.moves import moves
from colossus.layout.parameter import Initializer, rows_of

SPLITS = (None, "column", "row")


class Linear(Layer):
    """``torch.nn.Linear`` whose weight may be split over the tensor ranks.

    Alone (``split=None``) it takes and gives whole features, as torch's does, and is right anywhere in a model; how
    its weight is split is chosen by counted bytes, and a linear that does not divide is computed whole on every rank.
    A pair saves the traffic between its two: ``split="column"`` gives features that stay split, a
    `ShardedActivation`, on which element-by-element functions work and which ``split="row"`` takes back.

    Args:
        in_features: size of the last dim of the input.
        out_features: size of the last dim of the output; a mapping name -> size gives several outputs from one input,
            each its own logical parameter (``weight`` of ``query``, ...), with one matmul.
        bias: whether to add one.
        device: as torch has it; parameters are made on the device of the context.
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
            raise ValueError(f"Linear: split = {split!r}; use None (alone), 'column' or 'row'")
        fused = not isinstance(out_features, int)
        self.parts: dict[str, int] = dict(out_features) if isinstance(out_features, Mapping) else {"": out_features}
        self.in_features = in_features
        self.out_features = sum(self.parts.values())
        self.split = split
        self.is_fused = fused
        self.table = self._choose()
        layout = self.table.weight if self.table else Layout.whole(2)
        features = self.table.y.features if self.table else ()
        self.weight = self.make_parameter(
            {part: (out, in_features) for part, out in self.parts.items()},
            layout,
            init or torch_linear(in_features),
            dtype=dtype,
        )
        self.bias = (
            self.make_parameter(
                {part: (out,) for part, out in self.parts.items()},
                Layout((features,)),
                bias_init or torch_linear(in_features),
                dtype=dtype,
            )
            if bias
            else None
        )
        x, y = (self.table.x, self.table.y) if self.table else (self.plan.regions.user,) * 2
        self.decide_gradients(self.weight, x, y)
        self.decide_gradients(self.bias, y)
        ways = self.context.size(features) if features else 1
        self.local_parts = [out // ways for out in self.parts.values()]
        self._matmul_plans: dict[tuple[Activation, Activation, int], MatmulPlan] = {}

    def _choose(self) -> MatmulTable | None:
        """The table to take, by sizes and counted bytes."""
        tables = self.plan.tables
        if tables is None:
            return None
        chosen = tables.choose(self.split, self.in_features, self.parts)
        if isinstance(chosen, MatmulTable):
            return chosen
        if self.split is None:
            return whole(tables.regions)
        raise ValueError(
            f"Linear({self.in_features}, {self.out_features}, split={self.split!r}) under parallel.tensor.mode = "
            f"{self.plan.mode.name}: {'; '.join(map(str, chosen))}; or take split=None"
        )

    def forward(self, x: Tensor) -> Any:
        if self.table is None:
            return self._outputs(F.linear(x, self.weight, self.bias))
        if x.dim() == 1:  # one sample of every rank
            return one_sample(self, x)
        local, source, home = unwrap(x, self.plan)
        target = self.plan.regions.inner if self.split == "column" else home
        y = self.apply_local(local, source, target)
        if not self.is_fused:
            return wrap(y, target, home, self.plan)
        return tuple(wrap(part, target, home, self.plan) for part in y)

    def apply_local(self, x: Tensor, source: Activation, target: Activation) -> Any:
        """The product on plain local tensors, from one activation layout to another: what blocks call."""
        if self.table is None:
            return self._outputs(F.linear(x, self.weight, self.bias))
        key = (source, target, x.dim())
        plan = self._matmul_plans.get(key)
        if plan is None:
            plan = self._matmul_plans[key] = self._make_plan(*key)
        y = matmul(x, self.weight, self.bias, plan)
        if not self.is_fused:
            return y
        made = self._made(target)
        return tuple(move(part, made, target, self.context) for part in self._outputs(y))

    def _made(self, target: Activation) -> Activation:
        """How the matmul leaves y. Outputs side by side on each rank can only be moved over features one by one."""
        assert self.table is not None
        apart = self.is_fused and self.table.y.features != target.features
        return self.table.y if apart else target

    @property
    def member(self) -> Member:
        """The weight and its route, to be moved together with others."""
        assert self.table is not None
        steps = moves(self.table.weight, self.table.weight_used)
        return Member(self.weight, Route.of(steps, self.context, self._local_rows()))

    def _local_rows(self) -> list[int]:
        """Rows of each output in the local weight of a fused linear."""
        return [stop - start for start, stop in rows_of(self.weight)] if self.is_fused else []

    def _make_plan(self, source: Activation, target: Activation, ndim: int) -> MatmulPlan:
        assert self.table is not None
        self.check_stored(self.weight, self.table.weight)
        return make_plan(
            self.table,
            source,
            self._made(target),
            ndim,
            self.context,
            self.plan.weights,
            rows=self._local_rows(),
        )

    def _outputs(self, y: Tensor) -> Any:
        return torch.split(y, self.local_parts, dim=-1) if self.is_fused else y

    def extra_repr(self) -> str:
        parts = self.parts[""] if not self.is_fused else self.parts
        where = f", weight {self.table.weight}" if self.table else ""
        split = f", split={self.split!r}" if self.split else ""
        return f"{self.in_features}, {parts}, bias={self.bias is not None}{split}{where}"


def move_together(owner: Layer, *linears: Linear) -> None:
    """Let the weights of linears that follow each other share their collectives, where the config asks for it."""
    weights = owner.plan.weights
    if weights.coalesces and owner.is_split and not weights.is_together(linears[0].weight):
        weights.put_together(*(linear.member for linear in linears))
