"""Contexts of layers on a pretended device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from helpers.fake_cuda.pretend import DEVICE
from helpers.modes import Mode
from helpers.ranks import grid_of
from torch import Tensor

from colossus.context.grid import LayerOptions
from colossus.context.parallel_context import ParallelContext
from colossus.context.precision import DTYPES, Precision
from colossus.registry import TENSOR_MODES

CUDA = str(DEVICE)


@contextmanager
def fake_context(rank: int, mode: Mode, precision: str, **options: Any) -> Iterator[ParallelContext]:
    """On a rank of `run_fake_ranks`: the context of a tensor mode. ``precision`` as in ``train.precision``, or "pure
    bf16", with parameters that are narrow, too; ``options`` are of the layers."""
    axes = TENSOR_MODES.get(mode.name).axes
    plan = grid_of(data=mode.data, tensor=dict(zip(axes, mode.shape, strict=True)))
    of_layers = LayerOptions(tensor_mode=mode.name, sequence_sharded=mode.sequence_sharded, **options)
    compute = DTYPES[precision.split()[-1]]
    wide = torch.float64 if compute is torch.float64 else torch.float32
    stored = compute if precision == "pure bf16" else wide
    context = ParallelContext(
        plan, rank, options=of_layers, device=DEVICE, precision=Precision(stored, compute, wide, wide)
    )
    try:
        yield context
    finally:
        context.close()


def as_input(x: Any, precision: Precision) -> Any:
    """Numbers in the dtype of a batch, and with a gradient."""
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.to(precision.data).requires_grad_()
    return x
