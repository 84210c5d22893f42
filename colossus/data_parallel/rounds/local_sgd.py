"""Local SGD (1805.09767): replicas make steps of their own, and take their average after each round of them."""

from __future__ import annotations

from typing import Any

from colossus.data_parallel.options.averaging import LocalSGDOptions
from colossus.data_parallel.rounds.averaging import Averaging


class LocalSGD(Averaging):
    """x <- sum of (tokens_i / tokens) x_i after each ``period`` steps; the optimizer's state is the replica's own.

    With ``post_local`` it is post-local SGD (1808.07217): exact up to that step.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(LocalSGDOptions(**options))
