"""State dicts by logical name and full shape, whatever the plan."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from colossus.checkpoint.entries import Entry, Position, entries_of
from colossus.comm import collectives
from colossus.comm.objects import all_gather_object
from colossus.context.parallel_context import ParallelContext
from colossus.layout.redistribute import gather, shard


def full_state_dict(
    model: nn.Module, context: ParallelContext, *, gradients: bool = False, aliases: bool = True
) -> dict[str, Tensor]:
    """Whole parameters (or their gradients) by full logical name, on every rank, in the order of the whole model.

    All ranks must call. Buffers are included, except for gradients; a gradient that is None is left out. What is tied
    is there under each of its names, one tensor, as in ``torch.nn.Module.state_dict``, also where stages of a pipeline
    share it; a gradient, as in ``named_parameters``, under its first.

    Args:
        aliases: False leaves out the names of tied parameters and buffers but for the first.

    Returns:
        Tensors of full shape. Each rank holds all of them: this is for models that fit on one rank.
    """
    own: dict[str, tuple[Entry, Tensor]] = {}
    for name, entry in entries_of(model).items():
        if isinstance(entry.held, Tensor):
            if not gradients:
                own[name] = entry, entry.held.detach().clone()
            continue
        logical = entry.held
        buffer = logical.parameter.grad if gradients else logical.parameter.data
        if buffer is not None:
            own[name] = entry, gather(logical.local(buffer), logical.layout, logical.shape, context)
    return _exchange_stages(own, context, aliases=aliases and not gradients)


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor], context: ParallelContext) -> None:
    """Load whole parameters by logical name; each rank takes its shard. All ranks must call.

    Args:
        state: tensors of full shape, as `full_state_dict` returns them; of what is tied, one name is enough.

    Raises:
        ValueError: naming every key that is missing or left over, or whose shape differs, or names of one parameter
            under which the state dict has different values.
    """
    entries = entries_of(model)
    by_stage = all_gather_object(
        {name: list(entry.names) for name, entry in entries.items()}, context.group("pipeline")
    )
    known = {name: names for of_stage in by_stage for name, names in of_stage.items()}
    missing = sorted(name for name, names in known.items() if not any(each in state for each in names))
    extra = sorted(set(state) - {each for names in known.values() for each in names})
    if missing or extra:
        raise ValueError(
            f"the state dict does not fit the model: missing {missing or 'none'}, not in the model {extra or 'none'}"
        )
    chosen = {name: _value(name, entry, state) for name, entry in entries.items()}
    for name, entry in entries.items():
        if isinstance(entry.held, Tensor):
            entry.held.copy_(chosen[name])
        else:
            entry.held.local().copy_(shard(chosen[name], entry.held.layout, context))
    torch.clear_autocast_cache()  # a block around this would keep casts of what was there before


def _value(name: str, entry: Entry, state: Mapping[str, Tensor]) -> Tensor:
    """What the state dict has for an entry, under one or several of its names."""
    given = [each for each in entry.names if each in state]
    for each in given:
        if tuple(state[each].shape) != entry.shape:
            raise ValueError(f"{each}: the state dict has shape {tuple(state[each].shape)}, the model {entry.shape}")
    value = state[given[0]]
    for each in given[1:]:
        if state[each] is not value and not torch.equal(state[each], value):
            raise ValueError(
                f"{given[0]} and {each} are one parameter of the model (tied), but differ in the state dict: leave one "
                f"of them out, or build the model without the tie"
            )
    return value


def _exchange_stages(
    own: dict[str, tuple[Entry, Tensor]], context: ParallelContext, *, aliases: bool
) -> dict[str, Tensor]:
    """The entries of all stages on each of them, sorted by position; of a tied parameter those of the first stage."""
    group = context.group("pipeline")
    by_stage = all_gather_object({name: (e.names, x.shape, x.dtype) for name, (e, x) in own.items()}, group)
    first: dict[str, int] = {}
    for source, of_stage in enumerate(by_stage):
        for name in of_stage:
            first.setdefault(name, source)
    found: dict[str, tuple[Position, Tensor]] = {}
    for name, source in sorted(first.items(), key=lambda item: by_stage[item[1]][item[0]][0][item[0]]):
        names, shape, dtype = by_stage[source][name]
        x = own[name][1] if name in own else torch.empty(shape, dtype=dtype, device=context.device)
        whole = collectives.broadcast(x.contiguous(), group, source)
        found.update({each: (at, whole) for each, at in names.items() if aliases or each == name})
    return {name: whole for name, (_, whole) in sorted(found.items(), key=lambda item: item[1][0])}
