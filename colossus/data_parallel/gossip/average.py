"""Averaging of any tensors over ranks by gossip, apart from a strategy."""

from __future__ import annotations

import logging
import struct
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
from colossus.graphs.graph import Graph, make_graph
from colossus.graphs.graph_checks import problems_of
from colossus.nest import leaves, map_leaves

_KIND = 1
_WEIGHT = struct.Struct("<d")
_TIMEOUT_SECONDS = 120.0

log = logging.getLogger("colossus.engine")


def average(
    tensors: Any,
    *,
    graph: Any = "exponential",
    peers: int = 1,
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
        peers: to how many others a rank sends in an iteration.
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
    context = current_context()
    if context.world_size > 1:
        group, timeout = context.group("data"), context.timeout.total_seconds()
    else:
        group, timeout = launched_ranks("colossus.average"), _TIMEOUT_SECONDS
    problem, made, steps = None, None, 0
    try:
        found = _checked(tensors)
        made = _graph_of(graph, peers, group.size)
        steps = _iterations(made, iterations)
    except Exception as error:  # on one rank only, maybe: the others would wait for it
        problem, found = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}", []
    _require_alike(group, problem, found, made, f"iterations {steps}, push_sum {push_sum}")
    assert made is not None
    if group.size == 1 and context.rank == 0:
        log.warning("colossus.average: there is nobody to average with: tensors are given back as they are")
    if group.size == 1 or not found:
        return map_leaves(lambda tensor: tensor.detach().clone(), tensors)
    means = iter(_mix([tensor for _, tensor in found], made, steps, push_sum, group, timeout))
    return map_leaves(lambda _: next(means), tensors)


def _checked(tensors: Any) -> list[tuple[str, Tensor]]:
    """All tensors with their paths."""
    found = list(leaves(tensors, "tensors"))
    for path, tensor in found:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{path} is {type(tensor).__name__}; only tensors are averaged")
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"{path} is {_dtype(tensor)}: its mean is no such number; convert it: .float()")
        if tensor.layout is not torch.strided or tensor.device.type == "meta" or hasattr(tensor, "to_local"):
            raise ValueError(f"{path} is no dense tensor with values of this rank; of a DTensor average its to_local()")
    return found


def _graph_of(spec: Any, peers: Any, ranks: int) -> Graph:
    if not isinstance(peers, int) or isinstance(peers, bool) or peers < 1:
        raise ValueError(f"peers = {peers!r}: a whole number of at least 1")
    try:
        graph = make_graph(spec, ranks, peers)
    except ValueError as error:
        raise ValueError(f"graph over {ranks} ranks: {error}") from error
    if problems := problems_of(graph):
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


def _require_alike(
    group: AxisGroup, problem: str | None, found: list[tuple[str, Tensor]], graph: Graph | None, options: str
) -> None:
    """Raise on all ranks what is wrong on one of them, or differs between them: else the others would wait for it."""
    digest = b"" if graph is None else graph.digest()
    gives = [options, f"the graph {digest.hex()[:8]}", f"{len(found)} tensors"]
    gives += [f"{path}: {_dtype(tensor)} {list(tensor.shape)}" for path, tensor in found]
    everyone = all_gather_object((problem, gives), group)
    problems = [theirs for theirs, _ in everyone]
    for rank, its_problem in zip(group.ranks, problems, strict=True):
        if its_problem is not None:
            where = "" if len(set(problems)) == 1 else f" on rank {rank}"
            raise ValueError(f"colossus.average{where}: {its_problem}")
    first, rank = everyone[0][1], group.ranks[0]
    for other, (_, theirs) in zip(group.ranks, everyone, strict=True):
        for ours, its in zip(first, theirs, strict=False):
            if ours != its:
                raise ValueError(
                    f"colossus.average: rank {rank} gives {ours}, rank {other} gives {its}; all give the same"
                )


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
