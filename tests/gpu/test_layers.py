"""Every layer on the device in every dtype against plain torch in float64: output and all gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import layer_cases
from helpers.device_ranks import DeviceRanks
from helpers.ranks import grid

from colossus.context.parallel_context import ParallelContext

WIDE = (torch.float64, torch.float32)
LOW = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("name", layer_cases.CASES)
def test_a_layer(ranks: DeviceRanks, figures: Callable[[Any], None], name: str) -> None:
    figures(ranks.run_one(check_layer, name))


def check_layer(rank: int, device: torch.device, name: str) -> dict[str, float]:
    context = ParallelContext(grid(), device=device)
    gaps: dict[str, float] = {}
    for dtype in WIDE:
        gaps |= layer_cases.check(context, context, name, dtype)
    for dtype in LOW if layer_cases.CASES[name].has_low else ():
        gaps |= layer_cases.check(context, context, name, dtype)
        gaps |= layer_cases.check(context, context, name, torch.float32, autocast=dtype)
    return gaps
