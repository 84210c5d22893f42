"""torch's optimizers, fused unless the config says otherwise. Options by name, so that a misspelt one is found."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import nn


@cache
def _without_dynamo(optimizer: type[torch.optim.Optimizer]) -> type[Any]:
    """``optimizer`` without the wrappers that import ``torch._dynamo`` at its first call (1.6 s a rank).

    The wrappers break the graph where a compiled region contains the optimizer; the engine steps outside of any.
    """
    methods: dict[str, Any] = {
        name: inspect.unwrap(getattr(optimizer, name))
        for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    }
    methods["step"] = torch.no_grad()(inspect.unwrap(optimizer.step))
    # pickled as torch's own: under its name there is only that
    methods["__reduce__"] = lambda self: (object.__new__, (optimizer,), self.__getstate__())
    return type(optimizer.__name__, (optimizer,), {"__module__": optimizer.__module__, **methods})


def keep_lr_scales(groups: Iterable[dict[str, Any]], base_lr: float) -> None:
    """Keep the lr that each parameter group was made with as its share of ``optimizer.lr``, its ``lr_scale``.

    The schedule sets ``lr``; a group's own is the peak that it reaches.
    """
    for group in groups:
        if "lr" in group:
            group.setdefault("lr_scale", float(group["lr"]) / base_lr)


def _takes_fused(params: Iterable[nn.Parameter]) -> bool:
    """torch's fused kernels know no complex numbers."""
    return not any(param.is_complex() for param in params)


def _make(kind: Any, params: Iterable[nn.Parameter], fused: bool, **options: Any) -> torch.optim.Optimizer:
    params = list(params)
    made: torch.optim.Optimizer = _without_dynamo(kind)(params, fused=fused and _takes_fused(params), **options)
    return made


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
    return _make(
        torch.optim.AdamW,
        params,
        fused,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        amsgrad=amsgrad,
        maximize=maximize,
    )


def adam(
    params: Iterable[nn.Parameter],
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
    fused: bool = True,
) -> torch.optim.Optimizer:
    """``torch.optim.Adam``."""
    return _make(
        torch.optim.Adam,
        params,
        fused,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        amsgrad=amsgrad,
        maximize=maximize,
    )


def adagrad(
    params: Iterable[nn.Parameter],
    lr: float,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    maximize: bool = False,
) -> torch.optim.Optimizer:
    """``torch.optim.Adagrad``."""
    return _without_dynamo(torch.optim.Adagrad)(
        list(params),
        lr=lr,
        lr_decay=lr_decay,
        weight_decay=weight_decay,
        initial_accumulator_value=initial_accumulator_value,
        eps=eps,
        maximize=maximize,
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
    return _make(
        torch.optim.SGD,
        params,
        fused,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
    )
