"""The choice of the rule that updates the rows of a table: the optimizer's, or that of ``optimizer.tables``."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from colossus.config.components import options_of
from colossus.config.sections import Optimizer
from colossus.registry import OPTIMIZERS, TABLE_OPTIMIZERS
from colossus.rows.row_rules import RULES, Rule, rule_of

#: the ``step`` of torch's optimizers that have a rule for rows -> the rule's name
_RULE_OF: dict[Any, str] = {
    inspect.unwrap(torch.optim.SGD.step): "sgd",
    inspect.unwrap(torch.optim.Adagrad.step): "adagrad",
    inspect.unwrap(torch.optim.Adam.step): "adam",
    inspect.unwrap(torch.optim.AdamW.step): "adam",
    inspect.unwrap(torch.optim.SparseAdam.step): "adam",
}


def row_rule(optimizer: Any, group: dict[str, Any]) -> Rule | None:
    """Return the rule that updates tables of a parameter group: its ``row_rule``, or that of its optimizer.

    None for an optimizer that has none; a ``step`` that is not torch's may do anything.
    """
    if (name := group.get("row_rule")) is not None:
        return rule_of(name)
    return _rule_of_kind(type(optimizer), group)


def _rule_of_kind(kind: type, group: dict[str, Any]) -> Rule | None:
    name = _RULE_OF.get(inspect.unwrap(getattr(kind, "step", kind)))
    if name is None:
        return None
    return RULES["momentum" if name == "sgd" and group["momentum"] else name]


def _no_sparse_form(kind: str) -> str:
    return (
        f"{kind} has no form for sparse gradients, which update only the rows that a step has looked up. AdamW, Adam, "
        f"SparseAdam, Adagrad, SGD have one; or give the tables a rule of their own: optimizer.tables = "
        f"dict(type='SparseAdam'), in an optimizer of your own a parameter group with row_rule='adam' (one of "
        f"{', '.join(map(repr, RULES))}); or leave sparse=True out"
    )


def table_problem(optimizer: Any, name_of: dict[int, str]) -> str | None:
    """Return why an optimizer cannot update its tables, or None where it can.

    Args:
        optimizer: the optimizer.
        name_of: id of a table's parameter -> the table's full name.

    Raises:
        ValueError: a group's ``row_rule`` is not the name of a rule.
    """
    for number, group in enumerate(optimizer.param_groups):
        names = [name_of[id(param)] for param in group["params"] if id(param) in name_of]
        if names and row_rule(optimizer, group) is None:
            return f"{names[0]} has sparse gradients, but {_no_sparse_form(type(optimizer).__name__)}"
        if names and (group.get("weight_decay") or group.get("amsgrad")):
            return (
                f"its parameter group {number} has weight_decay or amsgrad, and holds {names[0]}, which has sparse "
                f"gradients: rows that a step has not looked up do not change. Give the table a group without them"
            )
    return None


# -- an optimizer that a config names ---------------------------------------------------------------------------


def require_optimizer_of_tables(section: Optimizer, tables: bool, *, is_custom: bool) -> None:
    """Raise ValueError unless the optimizer of a config fits a whole model, with tables or without.

    It does not fit where ``optimizer.tables`` is set without a table, or where its class has no rule for rows.

    Args:
        section: the ``optimizer`` section.
        tables: whether the model has tables.
        is_custom: whether a function of the caller makes the optimizer, and not the config.
    """
    if section.tables is not None and not tables:
        raise ValueError(
            "optimizer.tables is for tables with sparse gradients, but the model has none: make one with sparse=True "
            "(colossus.layers.Embedding, torch.nn.Embedding) that nothing else computes with, or leave "
            "optimizer.tables out"
        )
    if not tables or section.tables is not None or is_custom:
        return
    kind = OPTIMIZERS.get(section.type) if isinstance(section.type, str) else section.type
    if isinstance(kind, type) and _rule_of_kind(kind, {"momentum": 0}) is None:
        raise ValueError(f"the model has tables with sparse gradients, and {_no_sparse_form(kind.__name__)}")


def set_table_options(optimizer: Any, section: Optimizer) -> None:
    """Set the weight decay of groups named "tables" to 0, and their rule to that of ``optimizer.tables``."""
    for group in optimizer.param_groups:
        if group.get("name") != "tables":
            continue
        for table in group["params"]:  # torch.optim.Adagrad, say, has made state for its own rule at once
            optimizer.state.pop(table, None)
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
        if section.tables is not None:
            options = options_of("optimizer.tables", section.tables, TABLE_OPTIMIZERS)
            group |= {"lr": section.tables.lr or section.lr, **options.arguments, "row_rule": options.rule}
