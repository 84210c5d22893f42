"""How far replicas of a model are from each other, parameter by parameter."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.objects import all_gather_object
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext, current_context
from colossus.context.world import launched_ranks
from colossus.layout.parameter import spec_of
from colossus.layout.split_parameter import as_shards

#: name, dtype, shape
_Described = tuple[str, str, tuple[int, ...]]


class ReplicaDifferences(dict[str, float]):
    """By name of a parameter the largest difference of an element between any two replicas; 0 where all have the
    same, and infinite where some have NaN and others have not. Printed, it is a table, the largest first."""

    def __str__(self) -> str:
        if not self:
            return "no parameter has replicas"
        width = max(map(len, self))
        rows = sorted(self.items(), key=lambda item: -item[1])
        return "\n".join(f"{name:<{width}}  {difference:.6g}" for name, difference in rows)


@torch.no_grad()
def check_replicas(model: nn.Module, context: ParallelContext | None = None) -> ReplicaDifferences:
    """The largest difference between replicas of each parameter. Collective over all ranks; nothing is changed.

        print(colossus.check_replicas(model))

    Exact strategies keep replicas equal, gossip and asynchronous ones do not. Replicas are the ranks along ``data``,
    or, where no `ParallelContext` is open, all ranks of ``torch.distributed``. A parameter whose rows are cut over
    ``data`` (ZeRO, tables with owners) has no replicas, and is left out. Of one that is split over other axes it is the
    largest over all its shards.

    Args:
        model: of this rank, on each of its devices.
        context: of the run; None: the current one.

    Raises:
        ValueError: on all ranks, where replicas do not have the same parameters.
    """
    context = context or current_context()
    if context.world_size > 1:
        group, everyone, data = context.group("data"), context.group(context.grid.names), context.grid.axes("data")
    else:
        group = everyone = launched_ranks("colossus.check_replicas")
        data = ()
    with as_shards():
        params = {
            name: param.detach()
            for name, param in model.named_parameters()
            if set(data).isdisjoint(spec_of(param).layout.shard_axes)
        }
        _agree(params, group, everyone)
        own = {name: _difference(param, group) for name, param in params.items()}
    found = ReplicaDifferences()
    for theirs in all_gather_object(own, everyone):
        for name, difference in theirs.items():
            found[name] = max(difference, found.get(name, 0.0))
    return found


def _agree(params: dict[str, Tensor], group: AxisGroup, everyone: AxisGroup) -> None:
    """Raise on all ranks unless replicas have the same parameters: else a collective would end the process."""
    mine = [(name, str(param.dtype).removeprefix("torch."), tuple(param.shape)) for name, param in params.items()]
    problem = None
    for rank, theirs in zip(group.ranks, all_gather_object(mine, group), strict=True):
        if theirs != mine and problem is None:
            ours, other = _first_difference(mine, theirs)
            problem = f"rank {group.ranks[group.index]} has {ours}, and rank {rank} has {other}"
    problems = [found for found in all_gather_object(problem, everyone) if found is not None]
    if problems:
        raise ValueError(f"colossus.check_replicas: replicas have other parameters: {problems[0]}")


def _first_difference(mine: list[_Described], theirs: list[_Described]) -> tuple[str, str]:
    for ours, other in zip(mine, theirs, strict=False):
        if ours != other:
            return _in_words(ours), _in_words(other)
    return f"{len(mine)} parameters", f"{len(theirs)}"


def _in_words(param: _Described) -> str:
    name, dtype, shape = param
    return f"{name!r}, {dtype} {list(shape)}"


def _difference(param: Tensor, group: AxisGroup) -> float:
    """Of any two replicas the largest difference of an element."""
    if not param.numel() or group.size == 1:
        return 0.0
    values = torch.view_as_real(param.resolve_conj()) if param.is_complex() else param
    wide = values.double().flatten()
    missing = wide.isnan()
    known = wide.masked_fill(missing, 0)
    extremes = torch.stack([known, -known, missing.double(), -missing.double()])
    largest, smallest, some, none = collectives.all_reduce(extremes, group, op="max", owned=True).wait().unbind()
    if (some != -none).any():
        return math.inf
    return float(torch.where(largest == -smallest, 0.0, largest + smallest).max())
