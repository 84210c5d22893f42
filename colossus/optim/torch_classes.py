"""Optimizers of torch: their groups of parameters, and their classes without wrappers that import ``torch._dynamo``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch


@cache
def without_dynamo(optimizer: type[torch.optim.Optimizer]) -> type[Any]:
    """Return an optimizer class without the wrappers that import ``torch._dynamo`` at its first call (1.6 s a rank).

    The wrappers break the graph where a compiled region contains the optimizer; the engine steps outside of any.
    """
    methods: dict[str, Any] = {
        name: inspect.unwrap(getattr(optimizer, name))
        for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    }
    methods["step"] = torch.no_grad()(inspect.unwrap(optimizer.step))
    # pickled as torch's own class, the only one that is found under this name
    methods["__reduce__"] = lambda self: (object.__new__, (optimizer,), self.__getstate__())
    return type(optimizer.__name__, (optimizer,), {"__module__": optimizer.__module__, **methods})


def groups_of(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the groups of an optimizer's ``params``: parameters, or dicts of them with options."""
    params = list(params)
    return params if params and isinstance(params[0], dict) else [{"params": params}]
