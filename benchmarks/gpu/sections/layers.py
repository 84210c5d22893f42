"""Every layer on the device, in every dtype, against the same layer on the CPU in float64: output and all gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from helpers.ranks import grid

from benchmarks.gpu import layer_cases
from benchmarks.gpu.section import Case, Figures
from colossus.context.parallel_context import ParallelContext

WIDE = (torch.float64, torch.float32)
LOW = (torch.bfloat16, torch.float16)


def cases(device: torch.device, budget: float) -> Iterator[Case]:
    for name in layer_cases.CASES:
        yield Case(name, partial(_check, device, name))


def _check(device: torch.device, name: str) -> Figures:
    context = ParallelContext(grid(), device=device)
    found: dict[str, float] = {}
    for dtype in WIDE:
        found |= layer_cases.check(context, name, dtype)
    for dtype in LOW if layer_cases.CASES[name].has_low else ():
        found |= layer_cases.check(context, name, dtype)
        found |= layer_cases.check(context, name, torch.float32, autocast=dtype)
    return found
