"""State dicts of a model under any plan, by logical name and full shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from colossus.checkpoint.part import Part, Position
from colossus.comm import collectives
from colossus.comm.objects import all_gather_object
from colossus.context.parallel_context import ParallelContext
from colossus.layout.redistribute import gather, shard
from colossus.layout.split_parameter import as_shards
from colossus.state.model_parts import buffer_parts, parameter_parts


def full_state_dict(
    model: nn.Module, context: ParallelContext, *, gradients: bool = False, aliases: bool = True
) -> dict[str, Tensor]:
    """Return whole parameters, or their gradients, by full logical name, on every rank. Collective over all ranks.

    They are in the order of the whole model. Buffers are included, except for gradients; a gradient that is None is
    left out. A tied parameter is there under each of its names, as one tensor, as in ``torch.nn.Module.state_dict``,
    even if pipeline stages share it. A tied gradient is there under its first name, as in ``named_parameters``.

    If replicas have parameters of their own (gossip, local steps) each rank gets those of its replica. Call it inside
    of ``with engine.strategy.export():`` for the same on all.

    Args:
        model: the rank's part of the model.
        context: the rank's context.
        gradients: whether to return gradients in place of values.
        aliases: whether tied parameters and buffers have all their names, or the first alone.

    Returns:
        Tensors of full shape. Each rank has all of them: use this for models that fit on one rank, and
        `stream_state_dict` for others.
    """
    own = _own(model, context, gradients=gradients)
    tensors, stages = _over_stages(own, context)
    wholes = {first: _whole_of_stage(own.get(first), tensors[first], stages[first], context) for first in tensors}
    group = context.group("pipeline")
    for stage in range(group.size):
        of_stage = [whole for first, whole in wholes.items() if stages[first] == stage]
        collectives.broadcast_all(of_stage, group, stage)
    placed: dict[str, tuple[Position, Tensor]] = {}
    for first, whole in wholes.items():
        names = tensors[first].names if aliases and not gradients else {first: tensors[first].names[first]}
        placed.update({name: (at, whole) for name, at in names.items()})
    return {name: whole for name, (_, whole) in sorted(placed.items(), key=lambda item: item[1][0])}


def stream_state_dict(
    model: nn.Module, context: ParallelContext, *, order: Sequence[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole parameters and buffers of a model on rank 0, one after the other: of any size, under any plan.

        for name, value in stream_state_dict(engine.model, engine.context):  # on all ranks
            write(name, value)  # on rank 0

    All ranks must iterate: the others take part in the gathering and receive nothing. No rank has more than one whole
    parameter, beside the one that the loop still references. Rank 0 must iterate to the end, too.

    Args:
        model: the rank's part of the model.
        context: the rank's context.
        order: the first names of the wanted tensors, the same on all ranks. None is all, in the order of the model,
            under each of their names, which follow each other.

    Yields:
        (full logical name, tensor of full shape on the device of the context), as in the plain module's state dict.
    """
    own = _own(model, context)
    tensors, stages = _over_stages(own, context)
    for first in tensors if order is None else order:
        whole = _whole_of_stage(own.get(first), tensors[first], stages[first], context)
        collectives.broadcast(whole, context.group("pipeline"), stages[first])
        if context.is_logging_rank:
            for name in tensors[first].names if order is None else (first,):
                yield name, whole
        del whole


def whole_tensors(model: nn.Module, context: ParallelContext) -> dict[str, Part]:
    """Return the tensors of `stream_state_dict`, by first name, on all ranks, without memory. Collective over all."""
    return _over_stages(_own(model, context), context)[0]


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor], context: ParallelContext) -> None:
    """Load whole parameters by logical name; each rank takes its shard. Collective over all ranks.

    Args:
        model: the rank's part of the model.
        state: tensors of full shape, as `full_state_dict` returns them; one name of a tied parameter is enough.
        context: the rank's context.

    Raises:
        ValueError: naming every key that is missing or left over, or whose shape differs.
    """
    own = {part.key: part for part in (*parameter_parts(model, context), *buffer_parts(model))}
    names_by_first = {first: tensor.names.keys() for first, tensor in whole_tensors(model, context).items()}
    missing = sorted(first for first, names in names_by_first.items() if names.isdisjoint(state))
    extra = sorted(set(state).difference(*names_by_first.values()))
    if missing or extra:
        raise ValueError(
            f"the state dict does not fit the model: missing {missing or 'none'}, not in the model {extra or 'none'}"
        )
    chosen = {name: next(state[alias] for alias in part.names if alias in state) for name, part in own.items()}
    for name, part in own.items():
        if chosen[name].shape != part.shape:
            raise ValueError(f"{name}: the state dict has shape {tuple(chosen[name].shape)}, the model {part.shape}")
    with as_shards():
        for name, part in own.items():
            assert part.layout is not None
            _stored(part, part.memory).copy_(shard(chosen[name], part.layout, context, part.intervals))
    torch.clear_autocast_cache()  # else an autocast block around this call would use casts of the old values


#: a tensor of this rank, and what it stores of its value or gradient
_Shard = tuple[Part, Tensor]


def _own(model: nn.Module, context: ParallelContext, *, gradients: bool = False) -> dict[str, _Shard]:
    """Return the tensors of this rank with their memory, by first name."""
    own: dict[str, _Shard] = {}
    with as_shards():
        for part in parameter_parts(model, context):
            memory = part.memory.grad if gradients else part.memory.data
            if memory is not None and memory.is_sparse:  # a table's gradient, of some rows
                memory = memory.to_dense()
            if memory is not None:
                own[part.key] = part, _stored(part, memory)
        own |= {} if gradients else {part.key: (part, part.memory) for part in buffer_parts(model)}
    return own


def _stored(part: Part, memory: Tensor) -> Tensor:
    """Return all rows that a rank stores of a tensor: of the part's memory, or of another tensor of its shape."""
    is_all = part.rows is None or part.intervals is not None
    return memory if is_all else memory[slice(*part.rows)]  # type: ignore[misc]


def _over_stages(own: Mapping[str, _Shard], context: ParallelContext) -> tuple[dict[str, Part], dict[str, int]]:
    """Return the tensors of all stages in the model's order, and the first stage of each. Collective."""
    mine = {name: (part.names, part.shape, memory.dtype) for name, (part, memory) in own.items()}
    tensors: dict[str, Part] = {}
    stages: dict[str, int] = {}
    for stage, entries in enumerate(all_gather_object(mine, context.group("pipeline"))):
        for name, (names, shape, dtype) in entries.items():
            if stages.setdefault(name, stage) == stage:
                tensors[name] = Part.whole(name, torch.empty(shape, dtype=dtype, device="meta"), names=names)
    return dict(sorted(tensors.items(), key=lambda item: item[1].names[item[0]])), stages


def _whole_of_stage(own: _Shard | None, tensor: Part, stage: int, context: ParallelContext) -> Tensor:
    """Return a whole tensor on the first stage that has it, and memory for it on the others. Collective in a stage."""
    if own is None or context.index("pipeline") != stage:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=context.device)
    part, memory = own
    assert part.layout is not None
    return gather(memory, part.layout, part.shape, context, part.intervals)
