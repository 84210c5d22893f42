"""torch's optimizers, with the fused implementation where there is one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def adamw(params: Iterable[nn.Parameter], lr: float, **options: Any) -> torch.optim.Optimizer:
    """``torch.optim.AdamW``, fused unless ``foreach`` or ``fused`` says otherwise."""
    if "foreach" not in options:
        options.setdefault("fused", True)
    return torch.optim.AdamW(list(params), lr=lr, **options)


def sgd(params: Iterable[nn.Parameter], lr: float, **options: Any) -> torch.optim.Optimizer:
    """``torch.optim.SGD``, fused unless ``foreach`` or ``fused`` says otherwise."""
    if "foreach" not in options:
        options.setdefault("fused", True)
    return torch.optim.SGD(list(params), lr=lr, **options)
