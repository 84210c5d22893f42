"""What ``optimizer.tables`` may name: the rule of rows that each stands for, with all of its options."""

from __future__ import annotations

from typing import Any

#: name of a rule in `colossus.rows.row_rules`, its options
RuleOptions = tuple[str, dict[str, Any]]


def sgd(
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    weight_decay: float = 0.0,
) -> RuleOptions:
    """`colossus.rows.row_rules.SGD`, or `Momentum`."""
    options = dict(lr=lr, momentum=momentum, dampening=dampening, nesterov=nesterov, maximize=maximize)
    return "momentum" if momentum else "sgd", options


def adagrad(
    lr: float,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    initial_accumulator_value: float = 0.0,
    maximize: bool = False,
    weight_decay: float = 0.0,
) -> RuleOptions:
    """`colossus.rows.row_rules.Adagrad`."""
    initial = initial_accumulator_value
    return "adagrad", dict(lr=lr, lr_decay=lr_decay, eps=eps, initial_accumulator_value=initial, maximize=maximize)


def rowwise_adagrad(
    lr: float,
    eps: float = 1e-8,
    initial_accumulator_value: float = 0.0,
    maximize: bool = False,
    weight_decay: float = 0.0,
) -> RuleOptions:
    """`colossus.rows.row_rules.RowWiseAdagrad`."""
    initial = initial_accumulator_value
    return "rowwise_adagrad", dict(lr=lr, eps=eps, initial_accumulator_value=initial, maximize=maximize)


def sparse_adam(
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    maximize: bool = False,
    amsgrad: bool = False,
    weight_decay: float = 0.0,
) -> RuleOptions:
    """`colossus.rows.row_rules.Adam`."""
    return "adam", dict(lr=lr, betas=tuple(betas), eps=eps, maximize=maximize)
