"""torch's optimizers, fused unless the config says otherwise. Options by name, so that a misspelt one is found."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def adamw(
    params: Iterable[nn.Parameter],
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
    maximize: bool = False,
    fused: bool = True,
) -> torch.optim.Optimizer:
    """``torch.optim.AdamW``."""
    return torch.optim.AdamW(
        list(params),
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        amsgrad=amsgrad,
        maximize=maximize,
        fused=fused,
    )


def sgd(
    params: Iterable[nn.Parameter],
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    fused: bool = True,
) -> torch.optim.Optimizer:
    """``torch.optim.SGD``."""
    return torch.optim.SGD(
        list(params),
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
        fused=fused,
    )
