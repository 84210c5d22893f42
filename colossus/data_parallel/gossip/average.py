"""Averaging of any tensors over ranks by gossip, apart from a strategy."""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from colossus.comm.objects import all_gather_object
from colossus.comm.peers import PeerLinks
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import current_context
from colossus.context.world import launched_ranks
from colossus.data_parallel.parameter_vector import ParameterVector
from colossus.graphs.analysis import consensus
from colossus.graphs.checks import problems_of
from colossus.graphs.graph import Graph, make_graph
from colossus.graphs.peers import parse_peers
from colossus.nest import leaves, map_leaves

_KIND = 1
_WEIGHT = struct.Struct("<d")
_TIMEOUT_SECONDS = 120.0

log = logging.getLogger("colossus.engine")


def average(
    tensors: Any,
    *,
    graph: Any = "exponential",
    peers: int | Mapping[int, int] = 1,
    iterations: int | None = None,
    push_sum: bool = True,
) -> Any:
    """The mean of tensors over ranks, found by each mixing with a few others. Collective.

    Over the ranks along ``data`` of the current `ParallelContext`, or, where none is open, over all ranks of
    ``torch.distributed``. Each rank gives tensors of the same shapes and dtypes. They stay as they are, and what is
    returned requires no gradient. Those of 16 bits are mixed in float32.

        w = colossus.average(list(model.parameters()), graph="ring", iterations=10)

    Args:
        tensors: a tensor, or a nest (mappings, lists, tuples) of them: floating or complex.
        graph: as ``parallel.strategy.graph``: a name, ``dict(type=.., **options)``, a function or matrices.
        peers: to how many others a rank sends in an iteration, or that by the iteration from which it holds.
        iterations: how many; None: until the distance to the mean is below 1e-6 of what it was, or exact where the
            graph gives it (exponential: after log2 of n ranks).
        push_sum: divide by the weight of Stochastic Gradient Push (1811.10792). Without it what is returned tends to
            the mean only for graphs whose rows sum to 1, too.

    Returns:
        The same nest of new tensors.

    Raises:
        ValueError: on all ranks, for a graph or tensors that do not fit, or that differ between ranks.
        RuntimeError: a rank died, or was silent for too long.
    """
    group, timeout = _group()
    problem, made, steps = None, None, 0
    try:
        found = list(_checked(tensors))
        made = _graph_of(graph, peers, group.size)
        steps = _iterations(made, iterations)
        if not isinstance(push_sum, bool):
            raise ValueError(f"push_sum = {push_sum!r}: True or False")
    except ValueError as error:
        problem, found = str(error), []
    except Exception as error:  # a function of the user's own, say: the others would wait for this rank
        problem, found = f"{type(error).__name__}: {error}", []
    _agree(group, problem, found, made, (steps, push_sum))
    assert made is not None
    if group.size == 1:
        _say_alone()
    if group.size == 1 or not found:
        return map_leaves(lambda tensor: tensor.detach().clone(), tensors)
    means = iter(_mix([tensor for _, tensor in found], made, steps, push_sum, group, timeout))
    return map_leaves(lambda _: next(means), tensors)


def _group() -> tuple[AxisGroup, float]:
    """The ranks to average over, and how long one may be silent."""
    context = current_context()
    if context.world_size > 1:
        return context.group("data"), context.timeout.total_seconds()
    return launched_ranks("colossus.average"), _TIMEOUT_SECONDS


@cache
def _say_alone() -> None:
    """Once in a process."""
    context = current_context()
    if context.rank == 0:
        where = "parallel.data is 1" if context.world_size > 1 else "there is one rank"
        log.warning(
            "colossus.average: %s, so there is nobody to average with: tensors are given back as they are", where
        )


def _checked(tensors: Any) -> list[tuple[str, Tensor]]:
    """All tensors with their paths."""
    found = list(leaves(tensors, "tensors"))
    for path, tensor in found:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{path} is {type(tensor).__name__}; only tensors are averaged")
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"{path} is {_dtype(tensor)}: its mean is no such number; convert it: .float()")
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            kind = "on the meta device" if tensor.device.type == "meta" else f"of layout {tensor.layout}"
            raise ValueError(f"{path} is {kind}; only dense tensors with values are averaged")
        if hasattr(tensor, "to_local"):
            raise ValueError(f"{path} is a {type(tensor).__name__}; average its to_local(), the part of this rank")
    return found


def _graph_of(spec: Any, peers: Any, ranks: int) -> Graph:
    try:
        graph = make_graph(spec, ranks, parse_peers(peers))
    except ValueError as error:
        raise ValueError(f"graph over {ranks} ranks: {error}") from error
    problems = problems_of(graph)
    if problems:
        raise ValueError(f"graph over {ranks} ranks: {problems[0]}")
    return graph


def _iterations(graph: Graph, iterations: int | None) -> int:
    if iterations is None:
        steps = consensus(graph).steps if graph.replicas > 1 else 0
        if steps is None:
            raise ValueError("mixing by this graph does not come near the mean: say how many iterations")
        return steps
    if not isinstance(iterations, int) or isinstance(iterations, bool) or iterations < 0:
        raise ValueError(f"iterations = {iterations!r}: a whole number from 0, or None until the mean is reached")
    return iterations


def _agree(
    group: AxisGroup,
    problem: str | None,
    found: list[tuple[str, Tensor]],
    graph: Graph | None,
    options: tuple[int, bool],
) -> None:
    """Raise on all ranks what is wrong on one of them, or differs between them: else the others would wait for it."""
    tensors = [(path, _dtype(tensor), tuple(tensor.shape)) for path, tensor in found]
    mine: tuple[Any, ...] = (problem, tensors, None if graph is None else _digest(graph), options)
    everyone = all_gather_object(mine, group)
    for index, (theirs, _, _, _) in enumerate(everyone):
        if theirs is not None:
            same = all(each[0] == theirs for each in everyone)
            where = "" if same else f" on rank {group.ranks[index]}"
            raise ValueError(f"colossus.average{where}: {theirs}")
    first, rank = everyone[0], group.ranks[0]
    for index, (_, theirs, digest, chosen) in enumerate(everyone):
        other = group.ranks[index]
        if theirs != first[1]:
            raise ValueError(f"colossus.average: {_difference(first[1], rank, theirs, other)}")
        if (digest, chosen) != first[2:]:
            raise ValueError(
                f"colossus.average: rank {rank} has {_in_words(*first[3])}, rank {other} has {_in_words(*chosen)}"
                + (", and their graphs differ" if digest != first[2] else "")
                + "; all ranks give the same"
            )


def _difference(mine: list[Any], rank: int, theirs: list[Any], other: int) -> str:
    for (path, dtype, shape), (path_, dtype_, shape_) in zip(mine, theirs, strict=False):
        if (path, dtype, shape) != (path_, dtype_, shape_):
            return (
                f"{path} is {dtype} {list(shape)} on rank {rank}, and {path_} is {dtype_} {list(shape_)} on rank "
                f"{other}; they must be alike"
            )
    return f"rank {rank} gives {len(mine)} tensors, rank {other} gives {len(theirs)}; they must be alike"


def _in_words(iterations: int, push_sum: bool) -> str:
    return f"iterations {iterations}, push_sum {push_sum}"


def _digest(graph: Graph) -> str:
    """What tells graphs apart."""
    digest = hashlib.sha256()
    for phase in graph.phases:
        digest.update(struct.pack("<qq", phase.start, phase.period))
        for matrix in phase.matrices:
            digest.update(matrix.tobytes())
    return digest.hexdigest()


@torch.no_grad()
def _mix(
    tensors: list[Tensor], graph: Graph, iterations: int, push_sum: bool, group: AxisGroup, timeout: float
) -> list[Tensor]:
    mixed = [tensor.detach().to("cpu", _working(tensor.dtype)) for tensor in tensors]
    vector, me, weight = ParameterVector(mixed), group.index, 1.0
    held = vector.empty()
    vector.pack(held)
    links = PeerLinks(group, vector.nbytes, timeout)
    try:
        for number in range(iterations):
            at = graph.at(number)
            targets = [to for to, _ in at.targets(me)]
            if targets:
                data = links.buffer(vector.nbytes)
                data.copy_(held)
                links.send(targets, _KIND, number, data, _WEIGHT.pack(weight), dtype=vector.dtype, owned=True)
            parts, weight = vector.parts(held), weight * at.keeps(me)
            torch._foreach_mul_(parts, at.keeps(me))
            for source in at.sources(me):
                share, message = float(at.matrix[me, source]), links.receive(source, _KIND, number)
                torch._foreach_add_(parts, vector.parts(message.data), alpha=share)
                weight += share * _WEIGHT.unpack(message.meta)[0]
                links.release(message.data)
    finally:
        links.close()
    if push_sum and weight != 1.0:
        torch._foreach_div_(vector.parts(held), weight)
    views = vector.views(held)
    return [view.to(tensor.device, tensor.dtype, copy=True) for view, tensor in zip(views, tensors, strict=True)]


def _working(dtype: torch.dtype) -> torch.dtype:
    """In which it is mixed."""
    if dtype.is_complex:
        return torch.complex64 if dtype == torch.complex32 else dtype
    return torch.float32 if dtype.itemsize < 4 else dtype


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
