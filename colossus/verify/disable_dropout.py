"""Dropout turned off: its masks differ between plans by design, so nothing could be compared through them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from colossus.layers.dropout import Dropout

#: functions of torch.nn.functional that draw masks: name and position of the argument that is the rate
_DRAWING = {
    "dropout": ("p", 1),
    "dropout1d": ("p", 1),
    "dropout2d": ("p", 1),
    "dropout3d": ("p", 1),
    "alpha_dropout": ("p", 1),
    "feature_alpha_dropout": ("p", 1),
    "scaled_dot_product_attention": ("dropout_p", 4),
}


class DisabledDropout:
    """Turns dropout off in this process, from here on: in the modules of a model, and in calls of ``F.*``.

    A name that was imported out of torch.nn.functional (``from torch.nn.functional import dropout``) is not reached.

    Attributes:
        modules: names of the modules that had a rate above zero.
        calls: names of the functions that were called with a rate above zero.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = [name or "the model" for name, module in model.named_modules() if _disable(module)]
        self.calls: set[str] = set()
        for name, (key, place) in _DRAWING.items():
            setattr(F, name, self._without(name, getattr(F, name), key, place))

    def _without(self, name: str, function: Callable[..., Any], key: str, place: int) -> Callable[..., Any]:
        @functools.wraps(function)
        def without_dropout(*args: Any, **kwargs: Any) -> Any:
            if len(args) > place:
                args, rate = (*args[:place], 0.0, *args[place + 1 :]), args[place]
            else:
                rate = kwargs.get(key, 0.0 if key == "dropout_p" else 0.5)
                kwargs[key] = 0.0
            is_drawing = kwargs.get("training", args[place + 1] if key == "p" and len(args) > place + 1 else True)
            if rate and is_drawing:
                self.calls.add(f"torch.nn.functional.{name}")
            return function(*args, **kwargs)

        return without_dropout


def _disable(module: nn.Module) -> bool:
    """Set the rate of a module to zero; whether it had one."""
    if isinstance(module, Dropout | _DropoutNd):
        rate, module.p = module.p, 0.0
    elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        rate, module.dropout = float(module.dropout), 0.0
    else:
        return False
    return bool(rate)
