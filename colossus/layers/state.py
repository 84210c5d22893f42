"""State dicts by logical name and full shape, whatever the plan."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from colossus.context.parallel_context import ParallelContext
from colossus.layout.parameter import logical_parameters
from colossus.layout.redistribute import gather, shard


def full_state_dict(model: nn.Module, context: ParallelContext, *, gradients: bool = False) -> dict[str, Tensor]:
    """Whole parameters (or their gradients) by full logical name, on every rank. All ranks must call.

    Buffers are included, except for gradients; a gradient that is None is left out.
    """
    out: dict[str, Tensor] = {}
    for logical in logical_parameters(model):
        held = logical.parameter.grad if gradients else logical.parameter.data
        if held is not None:
            out[logical.name] = gather(logical.local(held), logical.layout, logical.shape, context)
    if not gradients:
        persistent = model.state_dict(keep_vars=True)
        for name, buffer in model.named_buffers():
            if name in persistent:
                out[name] = buffer.detach().clone()
    return out


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor], context: ParallelContext) -> None:
    """Load whole parameters by logical name; each rank takes its part.

    Raises:
        ValueError: naming every key that is missing or left over, or whose shape differs.
    """
    logicals = {logical.name: logical for logical in logical_parameters(model)}
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    missing = sorted({*logicals, *buffers} - set(state))
    extra = sorted(set(state) - {*logicals, *buffers})
    if missing or extra:
        raise ValueError(
            f"the state dict does not fit the model: missing {missing or 'none'}, not in the model {extra or 'none'}"
        )
    for name, value in state.items():
        shape = logicals[name].shape if name in logicals else tuple(buffers[name].shape)
        if tuple(value.shape) != shape:
            raise ValueError(f"{name}: the state dict has shape {tuple(value.shape)}, the model {shape}")
        if name in logicals:
            local = logicals[name].local()
            local.copy_(shard(value, logicals[name].layout, context))
        else:
            buffers[name].copy_(value)
