"""Optimizers on the rows that a step has touched."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def update_rows(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], param: nn.Parameter, ids: Tensor, rows: Tensor
) -> None:
    """Update the rows ``ids`` of a parameter by their gradients [n, dim], divided and clipped.

    Args:
        group: the parameter group that has the parameter: its options count. State is kept in ``optimizer.state``.

    Raises:
        ValueError: for an optimizer without a form for rows.
    """
    if isinstance(optimizer, torch.optim.SGD) and not group["momentum"]:
        param.detach().index_add_(0, ids, rows, alpha=-group["lr"])
        return
    raise ValueError(f"{type(optimizer).__name__} has no form for the rows of a table")
