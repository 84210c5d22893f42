"""Two trainings that ought to be the same, compared: the first thing that differs, and its cause.

``colossus verify CONFIG`` trains the user's own model under their plan and in one process, step by step in float64: two
launches of the user's config with one more hook, which in one process writes the values of each step, and under the
plan compares them. ``colossus verify RUN.verify REFERENCE.verify`` compares two records that `record` made of training
loops in any framework.
"""

from __future__ import annotations

from typing import Any

__all__ = ["record"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from colossus.verify.loop_recorder import record  # imported late: a config is checked without torch

    return record
