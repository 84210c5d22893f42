"""``colossus show --graph``: the peers of each replica by step, and how fast replicas reach consensus."""

from __future__ import annotations

import textwrap
from fractions import Fraction
from typing import Any

from colossus.arithmetic import aligned, counted
from colossus.config import Config, ConfigError
from colossus.config.plans import name_of, strategy_options
from colossus.graphs.analysis import Consensus, consensus, contraction
from colossus.graphs.graph import Graph, make_graph
from colossus.graphs.spec import name_of_graph

#: the most replicas and steps of a table
_ROWS, _STEPS = 32, 12
#: the most replicas for which matrices are multiplied and their norms computed
_ANALYSED = 512


def render_graph(config: Config) -> str:
    """Return the graph of a resolved config: peers by step, contraction, steps to consensus.

    Raises:
        ConfigError: the strategy has no graph, or there is one replica.
    """
    options: Any = strategy_options(config)
    strategy, replicas = name_of(config.parallel.strategy.type), config.parallel.data
    assert replicas is not None
    if not hasattr(options, "graph"):
        raise ConfigError(f"--graph: strategy {strategy!r} has no graph; parallel.strategy=sgp has one", config.source)
    if replicas == 1:
        raise ConfigError("--graph: a single replica (data 1) sends to nobody; parallel.data=4 shows four")
    graph = make_graph(options.graph, replicas, options.num_targets)
    overlap = options.delay
    late = f", messages travel for {counted(overlap, 'step')}" if overlap else ""
    head = (
        f"graph       {name_of_graph(options.graph) or 'matrices'} over data {replicas}\nstrategy    {strategy}{late}"
    )
    return "\n\n".join([head, _steps_of(graph), _speed(graph, overlap)])


def _steps_of(graph: Graph) -> str:
    repeats = f"repeats after {counted(graph.period, 'step')}" if graph.period > 1 else "the same in every step"
    steps, replicas = min(graph.period, _STEPS), min(graph.replicas, _ROWS)
    rows = [["replica", *(f"step {step}" for step in range(steps))]]
    rows += [[str(index), *(_targets(graph, step, index) for step in range(steps))] for index in range(replicas)]
    is_whole = (steps, replicas) == (graph.period, graph.replicas)
    cut = "" if is_whole else f"\n  (the first {counted(replicas, 'replica')} and {counted(steps, 'step')})"
    head = f"sends to    peer:weight, {repeats}; a replica keeps the rest of the weight"
    return f"{head}\n{textwrap.indent(aligned(rows), '  ')}{cut}"


def _targets(graph: Graph, step: int, index: int) -> str:
    targets = graph.steps[step].targets(index)
    if len(targets) > 8:
        return f"{len(targets)} others"
    return " ".join(f"{to}:{_number(weight)}" for to, weight in targets) or "-"


def _number(weight: float) -> str:
    fraction = Fraction(weight).limit_denominator(1000)
    return str(fraction) if abs(float(fraction) - weight) < 1e-12 else f"{weight:.4g}"


def _speed(graph: Graph, overlap: int) -> str:
    if graph.replicas > _ANALYSED:
        return f"contraction is not computed for more than {_ANALYSED} replicas"
    product = contraction(graph)
    name = "product" if product.is_doubly_stochastic else "de-biased product"
    lines = [
        f"contraction {product.norm:.4g} in {counted(product.period, 'step')} (2-norm of the {name} minus the mean)",
        f"eigenvalue  {product.eigenvalue:.4g} (second-largest modulus: the contraction in the long run)",
    ]
    if not product.is_doubly_stochastic:
        lines.append("weights     become unequal: columns sum to 1, rows do not")
    lines.append(f"consensus   {_consensus(consensus(graph))}, mixing alone")
    if overlap:
        lines.append(f"            {_consensus(consensus(graph, overlap))} with overlap {overlap}")
    return "\n".join(lines)


def _consensus(end: Consensus) -> str:
    if end.steps is None:
        return f"not within {end.tolerance:g} in sight"
    if end.is_exact:
        return f"exact after {counted(end.steps, 'step')}"
    return f"within {end.tolerance:g} after {counted(end.steps, 'step')}"
