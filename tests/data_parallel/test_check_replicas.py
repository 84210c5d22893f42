"""The largest difference between replicas, by name."""

from __future__ import annotations

import math
import re

import pytest
import torch
from helpers.ranks import grid, run_ranks
from torch import nn

import colossus
from colossus import layers
from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.check_replicas import ReplicaDifferences


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = layers.Linear(3, 6, split="column")
        self.norm = nn.LayerNorm(6)
        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        self.scalar = nn.Parameter(torch.zeros(()))


def _compare(context: ParallelContext) -> ReplicaDifferences:
    """Data 3, tensor 2: replicas differ, and one shard of a split weight does more than the other."""
    with context:
        model = colossus.build(Net)
    index, half = context.coordinates["data"], context.coordinates["tensor"]
    with torch.no_grad():
        same = colossus.check_replicas(model, context)
        assert same == dict.fromkeys(same, 0.0)
        model.up.weight[1, 2] = 0.25 * index * (half + 1)
        model.norm.weight[4] = torch.inf  # the same everywhere
        model.norm.bias[0] = torch.nan if index == 1 else 0.0
        model.phase[1] = complex(0, -index)
        model.scalar.fill_(torch.nan)
    return colossus.check_replicas(model, context)


def test_largest_difference_by_name() -> None:
    for found in run_ranks(6, _compare, plan=grid(data=3, tensor=2)):
        assert found == {
            "up.weight": 1.0,
            "up.bias": 0.0,
            "norm.weight": 0.0,
            "norm.bias": math.inf,
            "phase": 2.0,
            "scalar": 0.0,
        }
        lines = str(found).splitlines()
        assert re.fullmatch(r"norm\.bias +inf", lines[0])
        assert re.fullmatch(r"phase +2", lines[1])


def _unlike(context: ParallelContext) -> str:
    model = nn.Linear(3, 2 + (context.rank == 1))
    with pytest.raises(ValueError, match="replicas have other parameters") as told:
        colossus.check_replicas(model, context)
    return str(told.value)


def test_replicas_of_other_shapes_are_refused_on_all_ranks() -> None:
    words = set(run_ranks(3, _unlike, plan=grid(data=3)))
    assert len(words) == 1
    assert "rank 0 has 'weight', float32 [2, 3], and rank 1 has 'weight', float32 [3, 3]" in words.pop()


def test_a_lone_process_has_one_replica() -> None:
    assert colossus.check_replicas(nn.Linear(2, 2)) == {"weight": 0.0, "bias": 0.0}
    assert str(colossus.check_replicas(nn.Identity())) == "no parameter has replicas"
