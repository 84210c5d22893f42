"""Optimizers as rules on the rows of a table: only rows that have a gradient change, and so does only their state.

A rule given ``ids=None`` updates a whole tensor of any shape, as torch's dense optimizer does; what differs between the
two is said for each rule.
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
    """Of a table whose features are split over ranks: what a rule needs that looks at a whole row.

    Attributes:
        count: of the whole row.
        sum: [n] of this rank's features -> [n] of all of them; collective over the ranks that split them.
    """

    count: int
    sum: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Touched:
    """What an update is of: see `Rule.update`."""

    ids: Tensor | None
    rows: Tensor
    features: Features | None


class Rule:
    """Base. A rule has no state of its own: it is given the table, its state and the options of each update.

    Attributes:
        name: by which `rule_of` finds it.
        options: each option with its default; None: it has to be given.
        keys: of what `state` makes.
    """

    name: ClassVar[str]
    keys: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[Options]

    def state(self, table: Tensor, options: Options = _NO_OPTIONS) -> dict[str, Tensor]:
        """State of a table that has never been updated, under torch's names. What is not empty has a ``step``, the
        number of updates, which torch's Adam and Adagrad look for in a state that they load.
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
            table: [rows, dim]; with ``ids=None`` of any shape.
            state: what `state` made, or later updates have left; what it lacks is made.
            ids: int64 [n], distinct; None: ``rows`` is a gradient of the whole table.
            rows: [n, dim], the gradient of these rows: divided and clipped. Not changed.
            options: those of `options`, and others, which are not looked at (a parameter group of torch's).
            features: where ``dim`` is a part of the whole row's.

        Raises:
            ValueError: for rows together with weight decay or amsgrad, which need all rows in each update.
        """
        chosen = {key: options.get(key, default) for key, default in self.options.items()}
        if ids is not None and chosen.get("weight_decay"):
            raise ValueError(
                f"weight_decay = {chosen['weight_decay']}: rows that a step has not touched do not change, so a table "
                f"with sparse gradients takes none; give the table a parameter group with weight_decay=0"
            )
        if options.get("amsgrad"):
            raise ValueError("amsgrad has no form for the rows of a table; leave it out")
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

    def _update(self, table: Tensor, state: State, of: Touched, options: Options) -> None:
        raise NotImplementedError


class SGD(Rule):
    """``torch.optim.SGD`` without momentum, which is lazy by nature."""

    name = "sgd"
    options = {"lr": None, "weight_decay": 0.0, "maximize": False}

    def _update(self, table: Tensor, state: State, of: Touched, options: Options) -> None:
        _add(table, of.ids, of.rows, -float(options["lr"]))


class Momentum(Rule):
    """``torch.optim.SGD`` with momentum, lazily: v = momentum v + (1 - dampening) g for the rows touched, and w -= lr v
    for them alone (nesterov: w -= lr (g + momentum v)).

    Dense SGD goes on moving a row by its velocity after its last gradient, and torch's SGD does so with sparse
    gradients, too; here a row stands still until its next gradient, and its velocity with it. As in torch the first
    update of a table takes its gradients undampened.
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

    def _update(self, table: Tensor, state: State, of: Touched, options: Options) -> None:
        _count(state)
        momentum = options["momentum"]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(table)
            velocity = of.rows.clone()
        else:
            velocity = _take(state["momentum_buffer"], of.ids)
            velocity = velocity.mul_(momentum).add_(of.rows, alpha=1 - options["dampening"])
        _put(state["momentum_buffer"], of.ids, velocity)
        step = of.rows.add(velocity, alpha=momentum) if options["nesterov"] else velocity
        _add(table, of.ids, step, -float(options["lr"]))


class Adagrad(Rule):
    """``torch.optim.Adagrad``, which is lazy on sparse gradients: sum += g^2; w -= lr' g / (sqrt(sum) + eps), with
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

    def _update(self, table: Tensor, state: State, of: Touched, options: Options) -> None:
        lr = float(options["lr"]) / (1 + (_count(state) - 1) * options["lr_decay"])
        squares = _take(state["sum"], of.ids).addcmul_(of.rows, of.rows)
        _put(state["sum"], of.ids, squares)
        _add(table, of.ids, of.rows / squares.sqrt().add_(options["eps"]), -lr)


class RowWiseAdagrad(Rule):
    """Adagrad with one accumulator a row, as FBGEMM's ``EXACT_ROWWISE_ADAGRAD``: sum += mean of g^2 over the features
    of the row; w -= lr g / (sqrt(sum) + eps). State: ``sum`` [rows, 1], beside ``step``.

    Where features are split over ranks the mean is over all of them.
    """

    name = "rowwise_adagrad"
    keys = ("sum",)
    options = {"lr": None, "eps": 1e-8, "initial_accumulator_value": 0.0, "maximize": False}

    def state(self, table: Tensor, options: Options = _NO_OPTIONS) -> dict[str, Tensor]:
        initial = options.get("initial_accumulator_value", 0.0)
        return {"step": torch.zeros(()), "sum": table.new_full((table.shape[0], 1), initial, requires_grad=False)}

    def _update(self, table: Tensor, state: State, of: Touched, options: Options) -> None:
        _count(state)
        squares = of.rows.square().flatten(1).sum(1) if of.rows.dim() > 1 else of.rows.square()
        count = of.rows[0].numel() if len(of.rows) else 1
        if of.features is not None:
            squares, count = of.features.sum(squares), of.features.count
        sums = _take(state["sum"], of.ids).add_(squares.unsqueeze(1), alpha=1 / count)
        _put(state["sum"], of.ids, sums)
        scale = sums.sqrt().add(options["eps"]).view(-1, *(1,) * (of.rows.dim() - 1))
        _add(table, of.ids, of.rows / scale, -float(options["lr"]))


class Adam(Rule):
    """``torch.optim.SparseAdam`` on rows: averages of the rows touched move, with the bias correction of the number of
    updates of the whole table.

    It is not dense Adam, in which the averages of a row decay, and so move the row, in each step without a gradient of
    it. With ``ids=None`` it is torch's dense Adam, weight decay included (``decoupled_weight_decay``: AdamW's), whose
    ``eps`` is added after the bias correction; SparseAdam adds it before.
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

    def _update(self, table: Tensor, state: State, of: Touched, options: Options) -> None:
        beta1, beta2 = (float(beta) for beta in options["betas"])
        step, lr, eps = _count(state), float(options["lr"]), options["eps"]
        if of.ids is None and table.device.type == "cpu" and table.is_contiguous():
            # torch's fused kernel: about ten times as fast as its formula, operation by operation
            torch._fused_adam_(
                [table], [of.rows.contiguous()], [state["exp_avg"]], [state["exp_avg_sq"]], [], [torch.tensor(step)],
                lr=lr, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=eps, amsgrad=False, maximize=False,
            )  # fmt: skip
            return
        mean = _take(state["exp_avg"], of.ids).lerp_(of.rows, 1 - beta1)
        square = _take(state["exp_avg_sq"], of.ids).mul_(beta2).addcmul_(of.rows, of.rows, value=1 - beta2)
        _put(state["exp_avg"], of.ids, mean)
        _put(state["exp_avg_sq"], of.ids, square)
        correction1, correction2 = 1 - beta1**step, math.sqrt(1 - beta2**step)
        if of.ids is None:
            _add(table, of.ids, mean / square.sqrt().div_(correction2).add_(eps), -lr / correction1)
        else:
            _add(table, of.ids, mean / square.sqrt().add_(eps), -lr * correction2 / correction1)


#: by name
RULES: dict[str, Rule] = {rule.name: rule for rule in (SGD(), Momentum(), Adagrad(), RowWiseAdagrad(), Adam())}


def rule_of(name: str) -> Rule:
    """
    Raises:
        ValueError: for a name that no rule has.
    """
    if name not in RULES:
        raise ValueError(f"no rule {name!r} for rows; there are {', '.join(RULES)}")
    return RULES[name]


def _count(state: State) -> float:
    """The number of this update, from 1; counted in ``state["step"]``, a tensor as torch's or a number."""
    state["step"] += 1
    return float(state["step"])


def _take(x: Tensor, ids: Tensor | None) -> Tensor:
    """Rows, as a copy; without ids the tensor itself."""
    return x if ids is None else x.index_select(0, ids)


def _put(x: Tensor, ids: Tensor | None, rows: Tensor) -> None:
    """Write back what `_take` gave, changed."""
    if ids is not None:
        x.index_copy_(0, ids, rows)
    elif rows is not x:
        x.copy_(rows)


def _add(x: Tensor, ids: Tensor | None, rows: Tensor, alpha: float) -> None:
    if ids is None:
        x.add_(rows, alpha=alpha)
    else:
        x.index_add_(0, ids, rows, alpha=alpha)
