"""State dicts by logical name and full shape: of a model under any plan, and from a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.matching import matches, natural_order
from colossus.checkpoint.tensor_box import Entry, Position, entries_of
from colossus.checkpoint.weight_sources import find_weights, open_weights
from colossus.comm import collectives
from colossus.comm.objects import all_gather_object
from colossus.context.parallel_context import ParallelContext
from colossus.layout.redistribute import gather, shard
from colossus.layout.split_parameter import as_shards

# -- of a model -------------------------------------------------------------------------------------------


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
    own = _own(model, gradients=gradients)
    tensors = _over_stages(own, context)
    wholes = {first: _whole_of_stage(own.get(first), tensor, context) for first, tensor in tensors.items()}
    group = context.group("pipeline")
    for stage in range(group.size):
        of_stage = [whole for first, whole in wholes.items() if tensors[first].stage == stage]
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
    own = _own(model, gradients=False)
    tensors = _over_stages(own, context)
    for first in tensors if order is None else order:
        whole = _whole_of_stage(own.get(first), tensors[first], context)
        collectives.broadcast(whole, context.group("pipeline"), tensors[first].stage)
        if context.is_logging_rank:
            for name in tensors[first].names if order is None else (first,):
                yield name, whole
        del whole


@dataclass(frozen=True)
class WholeTensor:
    """A parameter or buffer of the whole model.

    Attributes:
        names: its names, with the position of each in the state dict.
        shape: full shape.
        dtype: its dtype.
        stage: the first pipeline stage that has it.
    """

    names: Mapping[str, Position]
    shape: tuple[int, ...]
    dtype: torch.dtype
    stage: int = 0


def whole_tensors(model: nn.Module, context: ParallelContext) -> dict[str, WholeTensor]:
    """Return the tensors of `stream_state_dict`, by first name, on all ranks. Collective over all ranks."""
    return _over_stages(_own(model, gradients=False), context)


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
    entries = entries_of(model)
    names_by_first = {first: tensor.names.keys() for first, tensor in whole_tensors(model, context).items()}
    missing = sorted(first for first, names in names_by_first.items() if names.isdisjoint(state))
    extra = sorted(set(state).difference(*names_by_first.values()))
    if missing or extra:
        raise ValueError(
            f"the state dict does not fit the model: missing {missing or 'none'}, not in the model {extra or 'none'}"
        )
    chosen = {name: next(state[alias] for alias in entry.names if alias in state) for name, entry in entries.items()}
    for name, entry in entries.items():
        if chosen[name].shape != entry.shape:
            raise ValueError(f"{name}: the state dict has shape {tuple(chosen[name].shape)}, the model {entry.shape}")
    with as_shards():
        for name, entry in entries.items():
            if isinstance(entry.value, Tensor):
                entry.value.copy_(chosen[name])
            else:
                entry.value.local().copy_(shard(chosen[name], entry.value.layout, context, entry.value.intervals))
    torch.clear_autocast_cache()  # else an autocast block around this call would use casts of the old values


#: an entry of this rank, and the rank's part of its value or gradient
_Shard = tuple[Entry, Tensor]


def _own(model: nn.Module, *, gradients: bool) -> dict[str, _Shard]:
    """Return the entries of this rank with their parts, by first name."""
    own: dict[str, _Shard] = {}
    for name, entry in entries_of(model).items():
        if isinstance(entry.value, Tensor):
            if not gradients:
                own[name] = entry, entry.value
            continue
        parameter = entry.value.parameter
        with as_shards():
            buffer = parameter.grad if gradients else parameter.data
            if buffer is not None and buffer.is_sparse:  # a table's gradient, of some rows
                buffer = buffer.to_dense()
            if buffer is not None:
                own[name] = entry, entry.value.local(buffer)
    return own


def _over_stages(own: Mapping[str, _Shard], context: ParallelContext) -> dict[str, WholeTensor]:
    """Return the tensors of all stages by first name, in the order of the whole model. Collective."""
    mine = {name: (entry.names, entry.shape, part.dtype) for name, (entry, part) in own.items()}
    tensors: dict[str, WholeTensor] = {}
    for stage, entries in enumerate(all_gather_object(mine, context.group("pipeline"))):
        for name, (names, shape, dtype) in entries.items():
            tensors.setdefault(name, WholeTensor(names, shape, dtype, stage))
    return dict(sorted(tensors.items(), key=lambda item: item[1].names[item[0]]))


def _whole_of_stage(own: _Shard | None, tensor: WholeTensor, context: ParallelContext) -> Tensor:
    """Return a whole tensor on the first stage that has it, and memory for it on the others. Collective in a stage."""
    if own is None or context.index("pipeline") != tensor.stage:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=context.device)
    if isinstance(logical := own[0].value, Tensor):
        return own[1].detach().clone(memory_format=torch.contiguous_format)
    return gather(own[1], logical.layout, tensor.shape, context, logical.intervals)


# -- from a folder ----------------------------------------------------------------------------------------


def read_state_dict(
    path: Path | str, *, only: Sequence[str] | None = None, average: str | None = None, verify: bool = True
) -> dict[str, Tensor]:
    """Return whole parameters and buffers from a folder, as ``torch.nn.Module.load_state_dict(.., strict=True)`` needs.

    They are by full logical name, tied ones under each of their names, as one tensor. It needs no processes and no
    engine, whatever plan saved them.

        model.load_state_dict(read_state_dict("runs/first"))

    Args:
        path: a checkpoint, a folder of them (the latest is read) or a run folder; or a model folder of Hugging Face,
            whose tensors are returned under our names.
        only: patterns (`fnmatch`) of names; None is all.
        average: name of an average of the weights, "ema" or "swa", to read in place of the parameters.
        verify: whether to compare the checksums of all files first.

    Returns:
        Tensors on the host, of full shape and of the dtype in which they were stored.

    Raises:
        CheckpointError: if there is no whole checkpoint, or a pattern matches nothing.
    """
    return dict(stream_saved_state_dict(path, only=only, average=average, verify=verify))


def stream_saved_state_dict(
    path: Path | str, *, only: Sequence[str] | None = None, average: str | None = None, verify: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `read_state_dict` one after the other, with no more than one whole parameter in memory.

    Errors are raised at the call, before the first is read.

    Yields:
        (name, tensor); the names of a tied parameter follow each other, with the same tensor.
    """
    reader = open_weights(find_weights(path), average)
    names: dict[str, list[str]] = {name: [name] for name in sorted(reader.manifest.names("model"), key=natural_order)}
    for alias, name in reader.manifest.aliases.items():
        names[name].append(alias)
    if only is not None:
        for pattern in only:
            if not any(matches(name, (pattern,)) for aliases in names.values() for name in aliases):
                raise CheckpointError(f"{reader.folder}: {pattern!r} matches no name")
        names = {first: [name for name in aliases if matches(name, only)] for first, aliases in names.items()}
    if verify:
        reader.verify()

    def read() -> Iterator[tuple[str, Tensor]]:
        with reader:
            for first, wanted in names.items():
                whole = reader.tensor(f"model/{first}") if wanted else None
                yield from ((name, whole) for name in wanted if whole is not None)
                del whole

    return read()
