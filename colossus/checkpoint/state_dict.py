"""State dicts by logical name and full shape, whatever the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from colossus.comm import collectives
from colossus.context.parallel_context import ParallelContext
from colossus.layout.parameter import logical_parameters, places
from colossus.layout.redistribute import gather, shard


def full_state_dict(model: nn.Module, context: ParallelContext, *, gradients: bool = False) -> dict[str, Tensor]:
    """Whole parameters (or their gradients) by full logical name, on every rank, in the order of the whole model.

    All ranks must call. Buffers are included, except for gradients; a gradient that is None is left out. What stages
    of a pipeline share is there once.
    """
    own: dict[str, tuple[Any, Tensor]] = {}
    place_of = places(model)
    for number, logical in enumerate(logical_parameters(model)):
        place = place_of[logical.held_as], number
        held = logical.parameter.grad if gradients else logical.parameter.data
        if held is not None:
            own[logical.name] = place, gather(logical.local(held), logical.layout, logical.shape, context)
    if not gradients:
        for name, buffer in _buffers(model).items():
            own[name] = (place_of[name], 0), buffer.detach().clone()
    return _of_all_stages(own, context)


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor], context: ParallelContext) -> None:
    """Load whole parameters by logical name; each rank takes its part. All ranks must call.

    Raises:
        ValueError: naming every key that is missing or left over, or whose shape differs.
    """
    logicals = {logical.name: logical for logical in logical_parameters(model)}
    buffers = _buffers(model)
    known = {name for names in _from_stages([*logicals, *buffers], context) for name in names}
    missing, extra = sorted(known - set(state)), sorted(set(state) - known)
    if missing or extra:
        raise ValueError(
            f"the state dict does not fit the model: missing {missing or 'none'}, not in the model {extra or 'none'}"
        )
    for name, value in state.items():
        if name not in logicals and name not in buffers:  # of another stage
            continue
        shape = logicals[name].shape if name in logicals else tuple(buffers[name].shape)
        if tuple(value.shape) != shape:
            raise ValueError(f"{name}: the state dict has shape {tuple(value.shape)}, the model {shape}")
        if name in logicals:
            local = logicals[name].local()
            local.copy_(shard(value, logicals[name].layout, context))
        else:
            buffers[name].copy_(value)


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Those that are part of the state."""
    persistent = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in persistent}


def _of_all_stages(own: dict[str, tuple[Any, Tensor]], context: ParallelContext) -> dict[str, Tensor]:
    """What each rank of the pipeline has, on all of them, sorted by place."""
    facts = _from_stages({name: (place, x.shape, x.dtype) for name, (place, x) in own.items()}, context)
    first: dict[str, tuple[Any, int]] = {}
    for source, of_stage in enumerate(facts):
        for name, (place, _, _) in of_stage.items():
            first.setdefault(name, (place, source))
    out = {}
    for name, (_, source) in sorted(first.items(), key=lambda item: item[1][0]):
        _, shape, dtype = facts[source][name]
        x = own[name][1] if name in own else torch.empty(shape, dtype=dtype, device=context.device)
        out[name] = collectives.broadcast(x.contiguous(), context.group("pipeline"), source)
    return out


def _from_stages(value: Any, context: ParallelContext) -> list[Any]:
    """A small object of each rank of the pipeline."""
    group = context.group("pipeline")
    out = [value] * group.size
    if group.size > 1:
        dist.all_gather_object(out, value, group=group.process_group)
    return out
