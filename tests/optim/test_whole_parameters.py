"""Optimizers that look at whole parameters: some steps under a plan are those of one process with plain torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from helpers.few_steps import Ends, assert_is_plain, few_steps, plain_steps
from helpers.long import but
from helpers.plans import plans
from helpers.ranks import run_ranks
from helpers.training import SIZES
from helpers.twins import PlainGPT
from helpers.whole_optimizers import OPTIMIZERS
from torch import Tensor

MODEL = {**SIZES, "num_layers": 1}

PLANS = plans("alone", "1d", "2d", "2.5d", "3d", "data2_pipeline2", "zero1", "zero2_1d", "zero3")


def train(rank: int, plan: dict[str, Any]) -> dict[str, Ends]:
    """Body of a rank, for each optimizer."""
    return {name: few_steps(plan, MODEL, section) for name, (section, _) in OPTIMIZERS.items()}


@cache
def alone() -> dict[str, Ends]:
    return run_ranks(1, train, {}, with_context=False)[0]


@cache
def plain(name: str) -> dict[str, Tensor]:
    """From the weights with which one process of ours starts."""
    model = PlainGPT(**MODEL).double()
    model.load_state_dict(alone()[name][0])
    return plain_steps(model, OPTIMIZERS[name][1](list(model.named_parameters())))


@pytest.mark.parametrize("plan", but(("2d", "2.5d", "3d", "data2_pipeline2", "zero1", "zero2_1d"), PLANS))
def test_steps_are_those_of_plain_torch(plan: str) -> None:
    world, parallel = PLANS[plan]
    for found in run_ranks(world, train, parallel, with_context=False) if world > 1 else [alone()]:
        for name, ends in found.items():
            assert_is_plain(ends, plain(name), name)
