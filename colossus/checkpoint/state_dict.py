"""State dicts by logical name and full shape, whatever the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colossus.checkpoint.tensor_box import Entry, Position, entries_of
from colossus.comm import collectives
from colossus.comm.objects import all_gather_object
from colossus.context.parallel_context import ParallelContext
from colossus.layout.layout import Layout
from colossus.layout.redistribute import gather, shard
from colossus.layout.split_parameter import as_shards


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
    for first, of_stage in _over_stages(own, context):
        whole = _whole(own.get(first), of_stage, context)
        names = of_stage.names if aliases and not gradients else {first: of_stage.names[first]}
        found.update({name: (at, whole) for name, at in names.items()})
    return {name: whole for name, (_, whole) in sorted(found.items(), key=lambda item: item[1][0])}


def stream_state_dict(
    model: nn.Module, context: ParallelContext, *, aliases: bool = True, order: Sequence[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The whole parameters and buffers of a model one after the other, on rank 0; of any size, under any plan.

        for name, value in stream_state_dict(engine.model, engine.context):  # on all ranks
            write(name, value)  # on rank 0

    All ranks must iterate: the others take part in the gathering and are given nothing. No rank holds more than one
    whole parameter, beside the one that the loop still has. A loop that rank 0 leaves early is gone through to its end
    without it.

    Args:
        aliases: names of what is tied follow each other, each with the same tensor; False leaves out all but the first.
        order: the first names of those that are wanted, the same on all ranks; None is all, in the order of the model.

    Yields:
        (full logical name, tensor of full shape on the device of the context), as in the plain module's state dict.
    """
    own = _own(model, gradients=False)
    shards = _over_stages(own, context)
    if order is not None:
        known = dict(shards)
        shards = iter([(first, known[first]) for first in order])
    try:
        for first, of_stage in shards:
            whole = _whole(own.get(first), of_stage, context)
            if context.is_logging_rank:
                for name in of_stage.names if aliases else (first,):
                    yield name, whole
            del whole
    except GeneratorExit:
        for first, of_stage in shards:
            _whole(own.get(first), of_stage, context)
        raise


@dataclass(frozen=True)
class WholeTensor:
    """A parameter or buffer of the whole model: all its names, its full shape, and the dtype in which it is held."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


def whole_tensors(model: nn.Module, context: ParallelContext) -> dict[str, WholeTensor]:
    """What `stream_state_dict` gives, by first name. All ranks must call, and are told the same."""
    own = _own(model, gradients=False)
    return {
        first: WholeTensor(tuple(of_stage.names), of_stage.shape, of_stage.dtype)
        for first, of_stage in _over_stages(own, context)
    }


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
    with as_shards():
        for name, entry in entries.items():
            if isinstance(entry.held, Tensor):
                entry.held.copy_(chosen[name])
            else:
                entry.held.local().copy_(shard(chosen[name], entry.held.layout, context, entry.held.intervals))
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


@dataclass(frozen=True)
class _Shard:
    """What this rank has of a parameter, its gradient or a buffer."""

    entry: Entry
    held: Tensor

    @property
    def layout(self) -> Layout:
        held = self.entry.held
        return Layout.whole(held.dim()) if isinstance(held, Tensor) else held.layout

    def gather(self, context: ParallelContext) -> Tensor:
        """The whole; a copy. Collective over the axes of the layout."""
        held = self.entry.held
        if isinstance(held, Tensor):
            return self.held.detach().clone()
        return gather(self.held, held.layout, self.entry.shape, context, held.intervals)


@dataclass(frozen=True)
class _OfStage:
    """What is told of an entry between stages: the first of them that has it gives it."""

    source: int
    names: dict[str, Position]
    shape: tuple[int, ...]
    dtype: torch.dtype


def _own(model: nn.Module, *, gradients: bool) -> dict[str, _Shard]:
    """The entries of this rank by first name."""
    own: dict[str, _Shard] = {}
    for name, entry in entries_of(model).items():
        if isinstance(entry.held, Tensor):
            if not gradients:
                own[name] = _Shard(entry, entry.held)
            continue
        parameter = entry.held.parameter
        buffer = parameter.grad if gradients else parameter.data
        if buffer is not None and buffer.is_sparse:  # of some rows of a table
            buffer = buffer.to_dense()
        if buffer is not None:
            own[name] = _Shard(entry, entry.held.local(buffer))
    return own


def _over_stages(own: Mapping[str, _Shard], context: ParallelContext) -> Iterator[tuple[str, _OfStage]]:
    """The entries of all stages by first name, in the order of the whole model."""
    told = {name: (shard.entry.names, shard.entry.shape, shard.held.dtype) for name, shard in own.items()}
    first: dict[str, _OfStage] = {}
    for source, of_stage in enumerate(all_gather_object(told, context.group("pipeline"))):
        for name, (names, shape, dtype) in of_stage.items():
            first.setdefault(name, _OfStage(source, names, shape, dtype))
    return iter(sorted(first.items(), key=lambda item: item[1].names[item[0]]))


def _whole(shard: _Shard | None, of_stage: _OfStage, context: ParallelContext) -> Tensor:
    """A whole tensor on all ranks, gathered on the first stage that has it. Collective."""
    group = context.group("pipeline")
    if shard is not None and group.index == of_stage.source:
        whole = shard.gather(context)
    else:
        whole = torch.empty(of_stage.shape, dtype=of_stage.dtype, device=context.device)
    return collectives.broadcast(whole.contiguous(), group, of_stage.source)
