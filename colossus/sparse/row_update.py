"""Which rule updates the rows of a table: that of the optimizer, or another one of the table's parameter group."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from colossus.rows.rules import RULES, Rule, rule_of

#: torch's optimizers with a form for rows
SPARSE_FORMS = ("AdamW", "Adam", "SparseAdam", "Adagrad", "SGD")


def _of_sgd(group: dict[str, Any]) -> str:
    return "momentum" if group["momentum"] else "sgd"


#: the function that is ``step`` of an optimizer -> name of the rule with the options of a group
_RULE_OF: dict[Any, Callable[[dict[str, Any]], str]] = {
    inspect.unwrap(torch.optim.SGD.step): _of_sgd,
    inspect.unwrap(torch.optim.Adagrad.step): lambda _: "adagrad",
    inspect.unwrap(torch.optim.Adam.step): lambda _: "adam",
    inspect.unwrap(torch.optim.AdamW.step): lambda _: "adam",
    inspect.unwrap(torch.optim.SparseAdam.step): lambda _: "adam",
}


def row_rule(optimizer: Any, group: dict[str, Any]) -> Rule | None:
    """What updates the rows of the tables in a parameter group: its ``row_rule``, or the form of its optimizer.

    None for an optimizer that has no form for rows: one whose ``step`` is not torch's may do anything.
    """
    if (name := group.get("row_rule")) is not None:
        return rule_of(name)
    return rule_of_kind(type(optimizer), group)


def rule_of_kind(kind: type, group: dict[str, Any]) -> Rule | None:
    """That of a class of optimizers."""
    find = _RULE_OF.get(inspect.unwrap(getattr(kind, "step", kind)))
    return None if find is None else RULES[find(group)]


def no_sparse_form(kind: str) -> str:
    """What to say of an optimizer without one."""
    return (
        f"{kind} has no form for sparse gradients, which update only the rows that a step has looked up. "
        f"{', '.join(SPARSE_FORMS)} have one; or give the tables a rule of their own: optimizer.tables = "
        f"dict(type='SparseAdam'), in an optimizer of your own a parameter group with row_rule='adam' (one of "
        f"{', '.join(map(repr, RULES))}); or leave sparse=True out"
    )


def table_problem(optimizer: Any, name_of: dict[int, str]) -> str | None:
    """What keeps an optimizer from updating the tables that it holds, in words.

    Args:
        name_of: full name of each table, by the parameter's id.
    """
    for number, group in enumerate(optimizer.param_groups):
        names = [name_of[id(param)] for param in group["params"] if id(param) in name_of]
        if not names:
            continue
        try:
            rule = row_rule(optimizer, group)
        except ValueError as error:
            return f"parameter group {number} has row_rule = {group['row_rule']!r}: {error}"
        if rule is None:
            return f"{names[0]} has sparse gradients, but {no_sparse_form(type(optimizer).__name__)}"
        if group.get("weight_decay"):
            return (
                f"its parameter group {number} has weight_decay = {group['weight_decay']} and holds {names[0]}, which "
                f"has sparse gradients: rows that a step has not looked up do not change, so they would not decay. "
                f"Give it a group with weight_decay=0"
            )
        if group.get("amsgrad"):
            return (
                f"its parameter group {number} has amsgrad=True and holds {names[0]}, which has sparse gradients: "
                f"there is no form of amsgrad for rows. Give it a group without"
            )
        missing = [key for key, default in rule.options.items() if default is None and key not in group]
        if missing:
            return f"its parameter group {number}, which holds {names[0]}, has no {missing[0]}"
    return None
