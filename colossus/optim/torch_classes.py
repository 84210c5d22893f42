"""What optimizers of torch are given, and those of torch without what their wrappers import."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch


@cache
def without_dynamo(optimizer: type[torch.optim.Optimizer]) -> type[Any]:
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


def groups_of(params: Iterable[Any]) -> list[dict[str, Any]]:
    """What an optimizer is given as groups: parameters, or dicts of them with options."""
    params = list(params)
    return params if params and isinstance(params[0], dict) else [{"params": params}]
