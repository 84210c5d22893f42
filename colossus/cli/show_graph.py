"""``colossus show --graph``: who sends to whom in each step, and how fast that brings replicas together."""

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

#: replicas and steps that a table shows
_ROWS, _STEPS = 32, 12
#: replicas up to which matrices are multiplied and their norms taken
_ANALYSED = 512


def render_graph(config: Config) -> str:
    """The graph of a resolved config: peers by step, contraction, steps to consensus.

    Raises:
        ConfigError: for a strategy without a graph.
    """
    options: Any = strategy_options(config)
    strategy, replicas = name_of(config.parallel.strategy.type), config.parallel.data
    assert replicas is not None
    if not hasattr(options, "graph"):
        raise ConfigError(f"--graph: strategy {strategy!r} has no graph; parallel.strategy=sgp has one", config.source)
    if replicas == 1:
        raise ConfigError("--graph: data 1 is one replica, which sends to nobody; parallel.data=4 shows four")
    graph = make_graph(options.graph, replicas, options.sends_to)
    overlap = options.travels
    late = f", what is sent travels {counted(overlap, 'step')}" if overlap else ""
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
    left = "" if is_whole else f"\n  (the first {counted(replicas, 'replica')} and {counted(steps, 'step')})"
    return f"sends to    peer:weight, {repeats}; the rest is kept\n{textwrap.indent(aligned(rows), '  ')}{left}"


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
    found = contraction(graph)
    of, steps = "product" if found.is_doubly_stochastic else "de-biased product", counted(found.period, "step")
    lines = [
        f"contraction {found.norm:.4g} in {steps} (2-norm of the {of} minus the mean)",
        f"eigenvalue  {found.eigenvalue:.4g} (second-largest modulus: the contraction in the long run)",
    ]
    if not found.is_doubly_stochastic:
        lines.append("weights     become unequal: columns sum to 1, rows do not")
    lines.append(f"consensus   {_consensus(consensus(graph))}, mixing alone")
    if overlap:
        lines.append(f"            {_consensus(consensus(graph, overlap))} with overlap {overlap}")
    return "\n".join(lines)


def _consensus(found: Consensus) -> str:
    if found.steps is None:
        return f"not within {found.tolerance:g} in sight"
    if found.is_exact:
        return f"exact after {counted(found.steps, 'step')}"
    return f"within {found.tolerance:g} after {counted(found.steps, 'step')}"
