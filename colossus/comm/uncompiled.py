"""What a compiler leaves to Python: lookups whose shapes depend on the ids, and exchanges between ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """``torch.compiler.disable``, which imports ``torch._dynamo`` (1.6 s) only where something is being compiled."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return torch._dynamo.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call
