"""A graph of the user's own that is another one in each process is refused before anything is trained."""

from __future__ import annotations

import os

import numpy as np
from helpers.gossip import SGD, Net, classify, settings_of
from helpers.ranks import run_ranks

import colossus

REPLICAS = 3


def path(replicas: int, step: int) -> np.ndarray:
    """There and back, doubly stochastic, with another weight in the last process."""
    weight = 0.25 if int(os.environ["TEST_RANK"]) < replicas - 1 else 0.3
    matrix = np.eye(replicas)
    for one in range(replicas - 1):
        for row, sign in ((one, -1), (one + 1, 1)):
            matrix[row, one] += sign * weight
            matrix[row, one + 1] -= sign * weight
    return matrix


def _refusals(rank: int) -> list[str]:
    os.environ["TEST_RANK"] = str(rank)
    told = []
    for kind in ("sgp", "d-psgd", "ad-psgd"):
        try:
            colossus.initialize(settings_of(dict(type=kind, graph=path), REPLICAS, SGD), model=Net, loss_fn=classify)
        except ValueError as error:
            told.append(str(error))
    return told


def test_a_graph_that_differs_between_processes_is_refused_on_all() -> None:
    for told in run_ranks(REPLICAS, _refusals, with_context=False):
        assert len(told) == 3
        for line in told:
            assert line.startswith("parallel.strategy.graph: rank 2 has got other matrices than rank 0: every process")
