"""The local buffers of layers' parameters: on meta while a model is built, drawn from their specs afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from colossus.construct.hide_meta import HideMeta
from colossus.construct.init_trace import InitTrace
from colossus.construct.traced_value import TracedValue
from colossus.context.parallel_context import ParallelContext
from colossus.error_place import located_error
from colossus.layout.parameter import ParameterSpec
from colossus.random import hash_key

#: the trace of the current build, the last one innermost
_traces: list[InitTrace] = []


def is_building() -> bool:
    return bool(_traces)


def value_of(tensor: Tensor, *, is_transposed: bool = False) -> TracedValue:
    """Return the values that the current build's constructor gave to a parameter, as initial values of another."""
    return TracedValue(_traces[-1], tensor, is_transposed=is_transposed)


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor is not on meta; the current build hides that."""
    with torch._C.DisableTorchFunction():
        return not tensor.is_meta


def real_value(tensor: Tensor) -> Tensor:
    """Return a tensor with its values, after running the operations on it that the current build has recorded."""
    with torch._C.DisableTorchFunction():
        return _traces[-1].value(tensor) if _traces else tensor


def trace_constructor(factory: Callable[[], Any], seed: int) -> tuple[Any, InitTrace]:
    """Return the result of ``factory`` run under a trace, and the trace; `InitTrace` explains ``seed``."""
    trace = InitTrace(seed)
    _traces.append(trace)
    try:
        with HideMeta(trace), trace:
            return factory(), trace
    finally:
        _traces.pop()


def construct_again(factory: Callable[[], Any]) -> Any:
    """Return a second result of ``factory``, which the current build has called.

    The build does not see its parts, and they get no values.
    """
    with _disable_current_modes():
        model, _ = trace_constructor(factory, _traces[-1].seed)
    return model


def allocate(
    shape: tuple[int, ...], spec: ParameterSpec, context: ParallelContext, dtype: torch.dtype | None
) -> Tensor:
    """Return the buffer of a layer's parameter, ``shape`` on this rank: on meta in a build, else with its values.

    Args:
        shape: local shape: the shards of ``spec`` concatenated along dim 0.
        dtype: None for torch's default.

    Raises:
        ValueError: the parameter is split over ranks and made outside a build, so it has no name to draw from.
    """
    if _traces:
        with _disable_current_modes():
            buffer = torch.empty(shape, dtype=dtype, device="meta")
        _traces[-1].mark_sharded(buffer, spec)
        return buffer
    if context.world_size > 1:
        raise located_error(
            f"a {spec.description} is made outside a build, where it has no name to draw its values from: pass "
            f"the model as a class or function to colossus.initialize(model=...) or colossus.build(...)"
        )
    key = int(torch.randint(2**62, ()).item())
    return draw(spec, shape, context, key_of=lambda name: hash_key(key, name), dtype=dtype, device=context.device)


def draw(
    spec: ParameterSpec,
    shape: tuple[int, ...],
    context: ParallelContext,
    *,
    key_of: Callable[[str], int],
    dtype: torch.dtype | None,
    device: torch.device,
) -> Tensor:
    """Return this rank's buffer of a spec, ``shape``: every shard drawn by its own key, zeros behind a partial box.

    Args:
        key_of: returns the key of the logical parameter for the name of a shard within its module.
    """
    dtype = dtype or torch.get_default_dtype()
    out = torch.zeros(shape, dtype=dtype)
    for shard in spec.shards:
        assert shard.init is not None, "of a plain parameter"
        rows = out[shard.rows[0] : shard.rows[1]]
        for box in spec.boxes(shard, context.grid.sizes, context.coordinates):
            value = torch.from_numpy(shard.init(key_of(shard.name), shard.shape, box))
            rows[tuple(slice(0, size) for size in value.shape)] = value.to(dtype)
            rows = rows[len(value) :] if value.ndim else rows
    return out.to(device)
