"""The average of any tensors over ranks by gossip, without a strategy."""

from __future__ import annotations

import logging
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from colossus.comm.objects import all_gather_object
from colossus.comm.peers import PeerLinks
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import current_context
from colossus.context.world import launched_ranks
from colossus.data_parallel.gossip.push_sum import MIX, InFlight, PushSum
from colossus.data_parallel.parameter_vector import ParameterVector
from colossus.graphs.analysis import consensus
from colossus.graphs.graph import Graph, make_graph
from colossus.graphs.graph_checks import problems_of
from colossus.nest import leaves, map_leaves

_TIMEOUT_SECONDS = 120.0

log = logging.getLogger("colossus.engine")


def average(
    tensors: Any,
    *,
    graph: Any = "exponential",
    peers: int = 1,
    iterations: int | None = None,
) -> Any:
    """Return the mean of tensors over ranks, by gossip with a few other ranks (push-sum, 1811.10792). Collective.

    The mean is over the ranks along ``data`` of the current `ParallelContext`, or over all ranks of
    ``torch.distributed`` where no context is open. Each rank passes tensors of the same shapes and dtypes. They do not
    change, and the results require no gradient. Tensors of 16 bits are mixed in float32.

        w = colossus.average(list(model.parameters()), graph="ring", iterations=10)

    Args:
        tensors: a tensor, or a nest (mappings, lists, tuples) of tensors: floating or complex.
        graph: as ``parallel.strategy.graph``: a name, ``dict(type=.., **options)``, a function or matrices.
        peers: the number of ranks to which a rank sends in an iteration.
        iterations: the number of iterations; None: until the distance to the mean is below 1e-6 of the first one, or
            0 for a graph that reaches it (exponential: after log2 of n ranks).

    Returns:
        The same nest of new tensors.

    Raises:
        ValueError: on all ranks, where the graph or the tensors do not fit, or differ between ranks.
        RuntimeError: a rank died, or was silent for too long.
    """
    context = current_context()
    if context.world_size > 1:
        group, timeout = context.group("data"), context.timeout.total_seconds()
    else:
        group, timeout = launched_ranks("colossus.average"), _TIMEOUT_SECONDS
    problem, arguments, paths = "", [], []
    try:
        paths = _checked(tensors)
        mixing = make_graph(graph, group.size, peers)
        if problems := problems_of(mixing):
            raise ValueError(f"graph over {group.size} ranks: {problems[0]}")
        if iterations is None:
            iterations = consensus(mixing).steps
        if iterations is None:
            raise ValueError("mixing by this graph does not come near the mean: set the number of iterations")
        arguments = [f"iterations {iterations}", f"the graph {mixing.digest().hex()[:8]}"]
        arguments += [f"{path}: {_dtype(tensor)} {list(tensor.shape)}" for path, tensor in paths]
    except Exception as error:  # possibly on one rank only, for which the others would wait
        problem = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    _require_alike(group, problem, arguments)
    if group.size == 1 and context.rank == 0:
        log.warning("colossus.average: there is no other rank to average with, so tensors are returned as they are")
    if group.size == 1 or not paths:
        return map_leaves(lambda tensor: tensor.detach().clone(), tensors)
    means = iter(_mix([tensor for _, tensor in paths], mixing, iterations or 0, group, timeout))
    return map_leaves(lambda _: next(means), tensors)


def _checked(tensors: Any) -> list[tuple[str, Tensor]]:
    """Return all tensors with their paths.

    Raises:
        ValueError: a leaf is no tensor that can be averaged.
    """
    paths = list(leaves(tensors, "tensors"))
    for path, tensor in paths:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{path} is {type(tensor).__name__}; only tensors are averaged")
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"{path} is {_dtype(tensor)}, which cannot represent a mean; convert it: .float()")
        if tensor.layout is not torch.strided or tensor.device.type == "meta" or hasattr(tensor, "to_local"):
            raise ValueError(f"{path} is no dense tensor with values of this rank; of a DTensor average its to_local()")
    return paths


def _require_alike(group: AxisGroup, problem: str, arguments: list[str]) -> None:
    """Raise on all ranks where one has a problem, or their arguments differ, so that none waits for another."""
    everyone = all_gather_object((problem, arguments), group)
    for rank, (its_problem, its) in zip(group.ranks, everyone, strict=True):
        if its_problem:
            raise ValueError(f"colossus.average: {its_problem} (on rank {rank})")
        for one, other in zip_longest(everyone[0][1], its, fillvalue="nothing more"):
            if one != other:
                raise ValueError(
                    f"colossus.average: rank {group.ranks[0]} passes {one}, but rank {rank} {other}; pass the same on "
                    f"all ranks"
                )


@torch.no_grad()
def _mix(tensors: list[Tensor], graph: Graph, iterations: int, group: AxisGroup, timeout: float) -> list[Tensor]:
    mixed = [
        tensor.detach().to("cpu", torch.promote_types(tensor.dtype, torch.float32), copy=True).contiguous()
        for tensor in tensors
    ]
    push_sum, me = PushSum(ParameterVector(mixed)), group.index
    links = PeerLinks(group, push_sum.vector.nbytes, timeout)
    try:
        for number in range(iterations):
            step_graph = graph.at(number)
            push_sum.send(links, [to for to, _ in step_graph.targets(me)], number)
            messages = [
                InFlight(source, number, number, float(step_graph.matrix[me, source]))
                for source in step_graph.sources(me)
            ]
            for message in messages:
                message.fill(links.receive(message.source, MIX, number))
            push_sum.mix(step_graph.keeps(me), messages)
            for message in messages:
                links.release(message.received)
    finally:
        links.close()
    return [mean.to(tensor.device, tensor.dtype, copy=True) for mean, tensor in zip(mixed, tensors, strict=True)]


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
