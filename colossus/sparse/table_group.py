"""The parameter group of the tables, in an optimizer that a config names."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from colossus.config import Config
from colossus.config.schema import Optimizer
from colossus.registry import TABLE_OPTIMIZERS
from colossus.sparse.row_update import no_sparse_form, rule_of_kind

log = logging.getLogger("colossus.engine")


def require_optimizer_of_tables(section: Optimizer, tables: bool, *, is_given: bool) -> None:
    """That the optimizer of a config fits a whole model with tables, or without.

    Args:
        tables: whether it has some.
        is_given: whether the optimizer is a function's, which the config does not know.

    Raises:
        ValueError: for ``optimizer.tables`` without a table, and what can be known to have no form for rows.
    """
    if section.tables is not None and not tables:
        raise ValueError(
            "optimizer.tables is for tables with sparse gradients, but the model has none: make one with sparse=True "
            "(colossus.layers.Embedding, torch.nn.Embedding) that nothing else computes with, or leave "
            "optimizer.tables out"
        )
    if not tables or section.tables is not None or is_given:
        return
    if section.options.get("amsgrad"):
        raise ValueError(
            "optimizer.amsgrad = True: there is no form of amsgrad for the tables with sparse gradients of this model; "
            "leave it out, or give the tables a rule of their own: optimizer.tables = dict(type='SparseAdam')"
        )
    kind = section.type
    if isinstance(kind, type) and rule_of_kind(kind, {"momentum": 0}) is None:
        raise ValueError(f"the model has tables with sparse gradients, and {no_sparse_form(kind.__name__)}")


def group_tables(optimizer: Any, config: Config, is_table: Callable[[nn.Parameter], bool]) -> None:
    """Move the tables of this rank to a last group of their own, which every rank has, without weight decay; with
    ``optimizer.tables`` it has their rule and its options.
    """
    section = config.optimizer
    tables: list[nn.Parameter] = []
    names: list[str] = []
    for group in optimizer.param_groups:
        held = [(number, param) for number, param in enumerate(group["params"]) if is_table(param)]
        tables += [param for _, param in held]
        if "param_names" in group:
            names += [group["param_names"][number] for number, _ in held]
            group["param_names"] = [
                name for name, param in zip(group["param_names"], group["params"], strict=True) if not is_table(param)
            ]
        group["params"] = [param for param in group["params"] if not is_table(param)]
    for table in tables:  # some keep state from the start on (torch.optim.Adagrad), of the shape of their own rule
        optimizer.state.pop(table, None)
    first = optimizer.param_groups[0]
    group = {key: value for key, value in first.items() if key not in ("params", "param_names", "lr_scale")}
    group |= {"params": tables, "name": "tables"}
    if "param_names" in first:
        group["param_names"] = names
    if "weight_decay" in group:
        group["weight_decay"] = 0.0
    if section.tables is not None:
        spec = section.tables.spec()
        rule, options = TABLE_OPTIMIZERS.build({**spec, "lr": spec["lr"] or section.lr})
        group |= {**options, "row_rule": rule}
    optimizer.param_groups.append(group)


def tell_of_weight_decay(config: Config, optimizer: Any) -> None:
    """Once, on one rank: the tables have none."""
    decay = max((group.get("weight_decay") or 0 for group in optimizer.param_groups[:-1]), default=0)
    if decay:
        log.info(
            "optimizer.weight_decay = %g is of all parameters but the tables with sparse gradients: rows that a step "
            "has not looked up do not change, so tables take none",
            decay,
        )
