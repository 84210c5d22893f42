"""Optimizers as rules on the rows of a table: an update changes only the rows that have a gradient, and their state.

With ``ids=None`` a rule updates a whole tensor of any shape, as torch's dense optimizer does. Each rule says how the
two forms differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

State = MutableMapping[str, Any]
Options = Mapping[str, Any]
_NO_OPTIONS: Options = MappingProxyType({})


@dataclass(frozen=True)
class Features:
    """The features of a table that are split over ranks, for rules that need a whole row.

    Attributes:
        count: the number of features of a whole row.
        sum: adds values [n] of this rank's features to those of the other features' ranks. Collective over these ranks.
    """

    count: int
    sum: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Touched:
    """The rows that an update changes, and their gradients: see `Rule.update`."""

    ids: Tensor | None
    rows: Tensor
    features: Features | None


class Rule:
    """The base of rules. A rule keeps nothing: each update takes the table, its state and the options.

    Attributes:
        name: the name by which `rule_of` finds the rule.
        options: the default of each option; None: the option is required.
        keys: the keys that an update needs in the state.
    """

    name: ClassVar[str]
    keys: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[Options]

    def state(self, table: Tensor, options: Options = _NO_OPTIONS) -> dict[str, Tensor]:
        """Return the state of a table that has never been updated, under torch's names.

        Unless it is empty it has a ``step``, the number of updates, which torch's Adam and Adagrad need in a state that
        they load.
        """
        return {}

    @torch.no_grad()
    def update(
        self,
        table: Tensor,
        state: State,
        ids: Tensor | None,
        rows: Tensor,
        options: Options,
        features: Features | None = None,
    ) -> None:
        """Update a table and its state in place.

        Args:
            table: [num_rows, dim]; with ``ids=None`` of any shape.
            state: the state, from `state` or from an update before; missing entries are made.
            ids: int64 [n], distinct; None: ``rows`` is a gradient of the whole table.
            rows: [n, dim], the gradients of these rows, already divided and clipped. Not changed.
            options: those of `options`; others, as a parameter group of torch's has, are ignored.
            features: set where ``dim`` is a part of a whole row's features.

        Raises:
            ValueError: weight decay or amsgrad with rows, which would have to change all rows in each update.
        """
        chosen = {key: options.get(key, default) for key, default in self.options.items()}
        if ids is not None and chosen.get("weight_decay"):
            raise ValueError(
                f"weight_decay = {chosen['weight_decay']}: a table with sparse gradients takes no weight decay, since "
                f"rows without a gradient do not change in a step; give the table a parameter group with weight_decay=0"
            )
        if options.get("amsgrad"):
            raise ValueError("amsgrad is not supported for tables with sparse gradients; leave it out")
        if any(key not in state for key in self.keys):
            for key, value in self.state(table, chosen).items():
                state.setdefault(key, value)
        rows = rows.to(table.dtype)
        if chosen.get("maximize"):
            rows = -rows
        if ids is None and chosen.get("weight_decay"):
            if chosen.get("decoupled_weight_decay"):
                table.mul_(1 - float(chosen["lr"]) * chosen["weight_decay"])
            else:
                rows = rows.add(table, alpha=chosen["weight_decay"])
        self._update(table, state, Touched(ids, rows, features), chosen)

    def _update(self, table: Tensor, state: State, touched: Touched, options: Options) -> None:
        raise NotImplementedError


class SGD(Rule):
    """``torch.optim.SGD`` without momentum, which changes no other rows anyway."""

    name = "sgd"
    options = {"lr": None, "weight_decay": 0.0, "maximize": False}

    def _update(self, table: Tensor, state: State, touched: Touched, options: Options) -> None:
        _add(table, touched.ids, touched.rows, -float(options["lr"]))


class Momentum(Rule):
    """``torch.optim.SGD`` with momentum, of the rows that have a gradient.

    For these rows v = momentum v + (1 - dampening) g, and w -= lr v, or with nesterov w -= lr (g + momentum v).

    torch's SGD goes on moving a row by its velocity after its last gradient, also with sparse gradients. Here a row and
    its velocity do not change until the row's next gradient. As in torch, the first update of a table does not dampen
    its gradients.
    """

    name = "momentum"
    keys = ("step",)
    options = {
        "lr": None,
        "momentum": 0.9,
        "dampening": 0.0,
        "nesterov": False,
        "weight_decay": 0.0,
        "maximize": False,
    }

    def state(self, table: Tensor, options: Options = _NO_OPTIONS) -> dict[str, Tensor]:
        return {"step": torch.zeros(())}  # the velocity is made in the first update

    def _update(self, table: Tensor, state: State, touched: Touched, options: Options) -> None:
        _count(state)
        momentum = options["momentum"]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(table)
            velocity = touched.rows.clone()
        else:
            velocity = _take(state["momentum_buffer"], touched.ids)
            velocity = velocity.mul_(momentum).add_(touched.rows, alpha=1 - options["dampening"])
        _put(state["momentum_buffer"], touched.ids, velocity)
        step = touched.rows.add(velocity, alpha=momentum) if options["nesterov"] else velocity
        _add(table, touched.ids, step, -float(options["lr"]))


class Adagrad(Rule):
    """``torch.optim.Adagrad``, which changes no other rows: sum += g^2; w -= lr' g / (sqrt(sum) + eps).

    lr' = lr / (1 + (updates - 1) lr_decay), where updates are counted for the whole table.
    """

    name = "adagrad"
    keys = ("step", "sum")
    options = {
        "lr": None,
        "lr_decay": 0.0,
        "eps": 1e-10,
        "initial_accumulator_value": 0.0,
        "weight_decay": 0.0,
        "maximize": False,
    }

    def state(self, table: Tensor, options: Options = _NO_OPTIONS) -> dict[str, Tensor]:
        initial = options.get("initial_accumulator_value", 0.0)
        return {"step": torch.zeros(()), "sum": torch.full_like(table, initial)}

    def _update(self, table: Tensor, state: State, touched: Touched, options: Options) -> None:
        lr = float(options["lr"]) / (1 + (_count(state) - 1) * options["lr_decay"])
        squares = _take(state["sum"], touched.ids).addcmul_(touched.rows, touched.rows)
        _put(state["sum"], touched.ids, squares)
        _add(table, touched.ids, touched.rows / squares.sqrt().add_(options["eps"]), -lr)


class RowWiseAdagrad(Rule):
    """Adagrad with one accumulator for each row, as FBGEMM's ``EXACT_ROWWISE_ADAGRAD``.

    sum += mean of g^2 over the features of the row; w -= lr g / (sqrt(sum) + eps). The state is ``sum`` [num_rows, 1]
    and ``step``. Where features are split over ranks, the mean is over all of them.
    """

    name = "rowwise_adagrad"
    keys = ("sum",)
    options = {"lr": None, "eps": 1e-8, "initial_accumulator_value": 0.0, "maximize": False}

    def state(self, table: Tensor, options: Options = _NO_OPTIONS) -> dict[str, Tensor]:
        initial = options.get("initial_accumulator_value", 0.0)
        return {"step": torch.zeros(()), "sum": table.new_full((table.shape[0], 1), initial, requires_grad=False)}

    def _update(self, table: Tensor, state: State, touched: Touched, options: Options) -> None:
        _count(state)
        squares = touched.rows.square().flatten(1).sum(1) if touched.rows.dim() > 1 else touched.rows.square()
        count = touched.rows[0].numel() if len(touched.rows) else 1
        if touched.features is not None:
            squares, count = touched.features.sum(squares), touched.features.count
        sums = _take(state["sum"], touched.ids).add_(squares.unsqueeze(1), alpha=1 / count)
        _put(state["sum"], touched.ids, sums)
        scale = sums.sqrt().add(options["eps"]).view(-1, *(1,) * (touched.rows.dim() - 1))
        _add(table, touched.ids, touched.rows / scale, -float(options["lr"]))


class Adam(Rule):
    """``torch.optim.SparseAdam``: it changes the averages of the rows that have a gradient, and these rows.

    The bias correction is that of the number of updates of the whole table. In dense Adam the averages of a row decay
    and move the row in each step, also in steps without a gradient of it.

    With ``ids=None`` this is torch's dense Adam with its weight decay (AdamW's with ``decoupled_weight_decay``). Dense
    Adam adds ``eps`` after the bias correction, SparseAdam before it.
    """

    name = "adam"
    keys = ("step", "exp_avg", "exp_avg_sq")
    options = {
        "lr": None,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "decoupled_weight_decay": False,
        "maximize": False,
    }

    def state(self, table: Tensor, options: Options = _NO_OPTIONS) -> dict[str, Tensor]:
        return {"step": torch.zeros(()), "exp_avg": torch.zeros_like(table), "exp_avg_sq": torch.zeros_like(table)}

    def _update(self, table: Tensor, state: State, touched: Touched, options: Options) -> None:
        beta1, beta2 = (float(beta) for beta in options["betas"])
        step, lr, eps = _count(state), float(options["lr"]), options["eps"]
        if touched.ids is None and table.device.type == "cpu" and table.is_contiguous():
            # torch's fused kernel is about ten times as fast as its formula, operation by operation
            torch._fused_adam_(
                [table], [touched.rows.contiguous()], [state["exp_avg"]], [state["exp_avg_sq"]], [],
                [torch.tensor(step)], lr=lr, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=eps, amsgrad=False,
                maximize=False,
            )  # fmt: skip
            return
        mean = _take(state["exp_avg"], touched.ids).lerp_(touched.rows, 1 - beta1)
        square = (
            _take(state["exp_avg_sq"], touched.ids).mul_(beta2).addcmul_(touched.rows, touched.rows, value=1 - beta2)
        )
        _put(state["exp_avg"], touched.ids, mean)
        _put(state["exp_avg_sq"], touched.ids, square)
        correction1, correction2 = 1 - beta1**step, math.sqrt(1 - beta2**step)
        if touched.ids is None:
            _add(table, touched.ids, mean / square.sqrt().div_(correction2).add_(eps), -lr / correction1)
        else:
            _add(table, touched.ids, mean / square.sqrt().add_(eps), -lr * correction2 / correction1)


#: the rules by their names
RULES: dict[str, Rule] = {rule.name: rule for rule in (SGD(), Momentum(), Adagrad(), RowWiseAdagrad(), Adam())}


def rule_of(name: str) -> Rule:
    """Return the rule of this name.

    Raises:
        ValueError: no rule has this name.
    """
    if name not in RULES:
        raise ValueError(f"no rule {name!r} for rows; there are {', '.join(RULES)}")
    return RULES[name]


def _count(state: State) -> float:
    """Count this update in ``state["step"]``, a tensor as torch has it or a number, and return its number, from 1."""
    state["step"] += 1
    return float(state["step"])


def _take(x: Tensor, ids: Tensor | None) -> Tensor:
    """Return a copy of some rows; without ids, the tensor itself."""
    return x if ids is None else x.index_select(0, ids)


def _put(x: Tensor, ids: Tensor | None, rows: Tensor) -> None:
    """Write changed rows of `_take` back."""
    if ids is not None:
        x.index_copy_(0, ids, rows)
    elif rows is not x:
        x.copy_(rows)


def _add(x: Tensor, ids: Tensor | None, rows: Tensor, alpha: float) -> None:
    if ids is None:
        x.add_(rows, alpha=alpha)
    else:
        x.index_add_(0, ids, rows, alpha=alpha)
