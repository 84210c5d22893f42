"""Which weights are given away where the replicas of an engine have parameters of their own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any


def exported(holder: object) -> AbstractContextManager[Any]:
    """Around what reads the weights of an engine to give them away: inside, all replicas have the same (`Strategy.
    export`). Of anything else that has a model, nothing changes."""
    strategy = getattr(holder, "strategy", None)
    return nullcontext() if strategy is None else strategy.export()
