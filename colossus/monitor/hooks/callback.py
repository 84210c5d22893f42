"""A hook that calls a user's functions: ``hooks = [dict(type="Callback", on_step_end=my_function)]``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colossus.engine.fit import Hook
from colossus.monitor.hooks.options import CallbackOptions


class Callback(Hook):
    """A hook that calls functions where `Hook` calls the method of that name, with the same arguments.

    Args:
        functions: functions by the name of the method, see `CallbackOptions`.
    """

    def __init__(self, **functions: Callable[..., Any] | str) -> None:
        for name, function in CallbackOptions(**functions):
            if function is not None:
                setattr(self, name, function)
