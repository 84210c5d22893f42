"""Building a model on the meta device, and giving every parameter its values afterwards.

Plain parameters and buffers get what the constructor wrote (see `trace`), under a generator seeded by the run's seed
and their full name: it does not depend on the plan. Parameters of our own layers are drawn from their specs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from colossus.construct.init_trace import HideMeta, InitTrace
from colossus.context.parallel_context import ParallelContext
from colossus.layout.parameter import ParameterSpec
from colossus.random import hash_key

_traces: list[InitTrace] = []


def is_recording() -> bool:
    return bool(_traces)


def record(factory: Callable[[], Any], seed: int) -> tuple[Any, InitTrace]:
    """Run ``factory`` under a trace. ``seed``: of random numbers the factory wants to see at once."""
    trace = InitTrace(seed)
    _traces.append(trace)
    try:
        with HideMeta(), trace:
            return factory(), trace
    finally:
        _traces.pop()


def allocate(
    shape: tuple[int, ...], spec: ParameterSpec, context: ParallelContext, dtype: torch.dtype | None
) -> Tensor:
    """The buffer of a layer's parameter: on meta while a model is built, else drawn at once.

    Raises:
        ValueError: for a parameter that is split over ranks outside of a build: it has no name to draw from.
    """
    if _traces:
        with _disable_current_modes():
            buffer = torch.empty(shape, dtype=dtype, device="meta")
        _traces[-1].protect(buffer, spec)
        return buffer
    if context.world_size > 1:
        raise ValueError(
            f"a {spec.description} is made outside of a build, where it has no name to draw its values from: pass "
            f"the model as a class or function to colossus.initialize(model=...) or colossus.build(...)"
        )
    key = int(torch.randint(2**62, ()).item())
    return draw(spec, shape, context, key_of=lambda part: hash_key(key, part), dtype=dtype, device=context.device)


def draw(
    spec: ParameterSpec,
    shape: tuple[int, ...],
    context: ParallelContext,
    *,
    key_of: Callable[[str], int],
    dtype: torch.dtype | None,
    device: torch.device,
) -> Tensor:
    """The rank's buffer of a spec: every piece drawn by its own key, zeros where a box is uneven."""
    dtype = dtype or torch.get_default_dtype()
    out = torch.zeros(shape, dtype=dtype)
    for piece in spec.shards:
        box = piece.layout.box(piece.shape, context.grid.sizes, context.coordinates)
        value = torch.from_numpy(piece.init(key_of(piece.name), piece.shape, box))
        part = out[piece.rows[0] : piece.rows[1]]
        part[tuple(slice(0, size) for size in value.shape)] = value.to(dtype)
    return out.to(device)
