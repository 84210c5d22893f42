"""State dicts by logical name and full shape, whatever the plan."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.objects import all_gather_object
from colossus.context.parallel_context import ParallelContext
from colossus.layout.parameter import full_model_order, logical_parameters
from colossus.layout.redistribute import gather, shard

#: where an entry stands in the state dict of the whole model: number of its parameter or buffer, number within it
_Position = tuple[int, int]


def full_state_dict(model: nn.Module, context: ParallelContext, *, gradients: bool = False) -> dict[str, Tensor]:
    """Whole parameters (or their gradients) by full logical name, on every rank, in the order of the whole model.

    All ranks must call. Buffers are included, except for gradients; a gradient that is None is left out. A parameter
    that several stages of a pipeline hold (a tied embedding) is there once.

    Returns:
        Tensors of full shape. Each rank holds all of them: this is for models that fit on one rank.
    """
    entries: dict[str, tuple[_Position, Tensor]] = {}
    order = full_model_order(model)
    for number, logical in enumerate(logical_parameters(model)):
        buffer = logical.parameter.grad if gradients else logical.parameter.data
        if buffer is not None:
            whole = gather(logical.local(buffer), logical.layout, logical.shape, context)
            entries[logical.name] = (order[logical.parameter_name], number), whole
    if not gradients:
        for name, buffer in _persistent_buffers(model).items():
            entries[name] = (order[name], 0), buffer.detach().clone()
    return _exchange_stages(entries, context)


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor], context: ParallelContext) -> None:
    """Load whole parameters by logical name; each rank takes its shard. All ranks must call.

    Args:
        state: tensors of full shape, as `full_state_dict` returns them.

    Raises:
        ValueError: naming every key that is missing or left over, or whose shape differs.
    """
    logicals = {logical.name: logical for logical in logical_parameters(model)}
    buffers = _persistent_buffers(model)
    names_by_stage = all_gather_object([*logicals, *buffers], context.group("pipeline"))
    known = {name for names in names_by_stage for name in names}
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


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    persistent = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in persistent}


def _exchange_stages(entries: dict[str, tuple[_Position, Tensor]], context: ParallelContext) -> dict[str, Tensor]:
    """The entries of all stages on each of them, sorted by position; of a tied parameter those of the first stage."""
    group = context.group("pipeline")
    by_stage = all_gather_object({name: (at, x.shape, x.dtype) for name, (at, x) in entries.items()}, group)
    first: dict[str, tuple[_Position, int]] = {}
    for source, of_stage in enumerate(by_stage):
        for name, (at, _, _) in of_stage.items():
            first.setdefault(name, (at, source))
    out = {}
    for name, (_, source) in sorted(first.items(), key=lambda item: item[1][0]):
        _, shape, dtype = by_stage[source][name]
        x = entries[name][1] if name in entries else torch.empty(shape, dtype=dtype, device=context.device)
        out[name] = collectives.broadcast(x.contiguous(), group, source)
    return out
