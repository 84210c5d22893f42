"""State dicts by logical name and full shape, whatever the plan: of a model under one, and out of a folder."""

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
    """Whole parameters (or their gradients) by full logical name, on every rank, in the order of the whole model.

    All ranks must call. Buffers are included, except for gradients; a gradient that is None is left out. What is tied
    is there under each of its names, one tensor, as in ``torch.nn.Module.state_dict``, also where stages of a pipeline
    share it; a gradient, as in ``named_parameters``, under its first.

    Of replicas with parameters of their own (gossip, local steps) each rank gets its own replica's: call it inside of
    ``with engine.strategy.export():`` for those that all are to have.

    Args:
        aliases: False leaves out the names of tied parameters and buffers but for the first.

    Returns:
        Tensors of full shape. Each rank holds all of them: this is for models that fit on one rank, `stream_state_dict`
        for those that do not.
    """
    own = _own(model, gradients=gradients)
    found: dict[str, tuple[Position, Tensor]] = {}
    for first, tensor in _over_stages(own, context).items():
        whole = _whole(own.get(first), tensor, context)
        names = tensor.names if aliases and not gradients else {first: tensor.names[first]}
        found.update({name: (at, whole) for name, at in names.items()})
    return {name: whole for name, (_, whole) in sorted(found.items(), key=lambda item: item[1][0])}


def stream_state_dict(
    model: nn.Module, context: ParallelContext, *, order: Sequence[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The whole parameters and buffers of a model one after the other, on rank 0; of any size, under any plan.

        for name, value in stream_state_dict(engine.model, engine.context):  # on all ranks
            write(name, value)  # on rank 0

    All ranks must iterate: the others take part in the gathering and are given nothing. No rank holds more than one
    whole parameter, beside the one that the loop still has. Rank 0 must go through it to its end, too.

    Args:
        order: the first names of those that are wanted, the same on all ranks; None is all, in the order of the model,
            and under each of their names, which follow each other.

    Yields:
        (full logical name, tensor of full shape on the device of the context), as in the plain module's state dict.
    """
    own = _own(model, gradients=False)
    tensors = _over_stages(own, context)
    for first in tensors if order is None else order:
        whole = _whole(own.get(first), tensors[first], context)
        if context.is_logging_rank:
            for name in tensors[first].names if order is None else (first,):
                yield name, whole
        del whole


@dataclass(frozen=True)
class WholeTensor:
    """A parameter or buffer of the whole model: its names with the place of each in the state dict, its full shape, and
    the first pipeline stage that has it."""

    names: Mapping[str, Position]
    shape: tuple[int, ...]
    dtype: torch.dtype
    stage: int = 0


def whole_tensors(model: nn.Module, context: ParallelContext) -> dict[str, WholeTensor]:
    """What `stream_state_dict` gives, by first name. All ranks must call, and get the same."""
    return _over_stages(_own(model, gradients=False), context)


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor], context: ParallelContext) -> None:
    """Load whole parameters by logical name; each rank takes its shard. All ranks must call.

    Args:
        state: tensors of full shape, as `full_state_dict` returns them; of what is tied, one name is enough.

    Raises:
        ValueError: naming every key that is missing or left over, or whose shape differs.
    """
    entries = entries_of(model)
    known = {first: tensor.names.keys() for first, tensor in whole_tensors(model, context).items()}
    missing = sorted(first for first, names in known.items() if names.isdisjoint(state))
    extra = sorted(set(state).difference(*known.values()))
    if missing or extra:
        raise ValueError(
            f"the state dict does not fit the model: missing {missing or 'none'}, not in the model {extra or 'none'}"
        )
    chosen = {name: next(state[each] for each in entry.names if each in state) for name, entry in entries.items()}
    for name, entry in entries.items():
        if chosen[name].shape != entry.shape:
            raise ValueError(f"{name}: the state dict has shape {tuple(chosen[name].shape)}, the model {entry.shape}")
    with as_shards():
        for name, entry in entries.items():
            if isinstance(entry.held, Tensor):
                entry.held.copy_(chosen[name])
            else:
                entry.held.local().copy_(shard(chosen[name], entry.held.layout, context, entry.held.intervals))
    torch.clear_autocast_cache()  # a block around this would keep casts of what was there before


#: an entry of this rank, and the part that the rank has of it, or of its gradient
_Shard = tuple[Entry, Tensor]


def _own(model: nn.Module, *, gradients: bool) -> dict[str, _Shard]:
    """The entries of this rank by first name."""
    own: dict[str, _Shard] = {}
    for name, entry in entries_of(model).items():
        if isinstance(entry.held, Tensor):
            if not gradients:
                own[name] = entry, entry.held
            continue
        parameter = entry.held.parameter
        with as_shards():
            buffer = parameter.grad if gradients else parameter.data
            if buffer is not None and buffer.is_sparse:  # of some rows of a table
                buffer = buffer.to_dense()
            if buffer is not None:
                own[name] = entry, entry.held.local(buffer)
    return own


def _over_stages(own: Mapping[str, _Shard], context: ParallelContext) -> dict[str, WholeTensor]:
    """The entries of all stages by first name, in the order of the whole model. Collective."""
    mine = {name: (entry.names, entry.shape, held.dtype) for name, (entry, held) in own.items()}
    found: dict[str, WholeTensor] = {}
    for stage, of_stage in enumerate(all_gather_object(mine, context.group("pipeline"))):
        for name, (names, shape, dtype) in of_stage.items():
            found.setdefault(name, WholeTensor(names, shape, dtype, stage))
    return dict(sorted(found.items(), key=lambda item: item[1].names[item[0]]))


def _whole(own: _Shard | None, tensor: WholeTensor, context: ParallelContext) -> Tensor:
    """A whole tensor on all ranks, gathered on the first stage that has it. Collective."""
    group = context.group("pipeline")
    if own is None or group.index != tensor.stage:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=context.device)
    elif isinstance(own[0].held, Tensor):
        whole = own[1].detach().clone()
    else:
        held = own[0].held
        whole = gather(own[1], held.layout, tensor.shape, context, held.intervals)
    return collectives.broadcast(whole.contiguous(), group, tensor.stage)


# -- out of a folder --------------------------------------------------------------------------------------


def read_state_dict(
    path: Path | str, *, only: Sequence[str] | None = None, average: str | None = None, verify: bool = True
) -> dict[str, Tensor]:
    """Whole parameters and buffers by full logical name, as ``torch.nn.Module.load_state_dict(.., strict=True)`` takes
    them: tied ones under each of their names, one tensor. No processes, no engine, whatever the plan that saved them.

        model.load_state_dict(read_state_dict("runs/first"))

    Args:
        path: a checkpoint, a folder of them (the latest is read) or a run folder; or a model folder of Hugging Face,
            whose tensors are given by our names.
        only: patterns (`fnmatch`) of names; None is all.
        average: of the weights that a hook has kept, "ema" or "swa", in the place of the parameters.
        verify: compare the checksums of all files first.

    Returns:
        Tensors on the host, of full shape and of the dtype in which they were stored.

    Raises:
        CheckpointError: when there is no whole checkpoint, or a pattern meets nothing.
    """
    return dict(stream_saved_state_dict(path, only=only, average=average, verify=verify))


def stream_saved_state_dict(
    path: Path | str, *, only: Sequence[str] | None = None, average: str | None = None, verify: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """What `read_state_dict` gives, one after the other: no more than one whole parameter is held.

    What is wrong is raised at the call, before the first is read.

    Yields:
        (name, tensor); the names of a tied parameter follow each other, with the same tensor.
    """
    reader = open_weights(find_weights(path), average)
    names: dict[str, list[str]] = {name: [name] for name in sorted(reader.manifest.names("model"), key=natural_order)}
    for alias, name in reader.manifest.aliases.items():
        names[name].append(alias)
    if only is not None:
        for pattern in only:
            if not any(matches(name, (pattern,)) for of_one in names.values() for name in of_one):
                raise CheckpointError(f"{reader.folder}: {pattern!r} meets no name")
        names = {first: [each for each in of_one if matches(each, only)] for first, of_one in names.items()}
    if verify:
        reader.verify()

    def read() -> Iterator[tuple[str, Tensor]]:
        with reader:
            for first, wanted in names.items():
                whole = reader.tensor(f"model/{first}") if wanted else None
                yield from ((name, whole) for name in wanted if whole is not None)
                del whole

    return read()
