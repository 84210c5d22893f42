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
        raise ConfigError(
            f"--graph: strategy {strategy!r} has no graph; those that mix with some peers have: "
            f"parallel.strategy.type=sgp",
            config.source,
        )
    if replicas == 1:
        raise ConfigError("--graph: data 1 is one replica, which sends to nobody; parallel.data=4 shows four")
    graph = make_graph(options.graph, replicas, options.sends_to)
    name = name_of_graph(options.graph) or "matrices"
    overlap = options.travels
    head = [
        f"graph       {name} over data {replicas}",
        f"strategy    {strategy}" + (f", what is sent travels {counted(overlap, 'step')}" if overlap else ""),
    ]
    return "\n\n".join(["\n".join(head), _steps_of(graph), _speed(graph, overlap)])


def _steps_of(graph: Graph) -> str:
    peers = f"peers {graph.peers}, " if graph.family.takes_peers else ""
    repeats = f"repeats after {counted(graph.period, 'step')}" if graph.period > 1 else "the same in every step"
    title = f"sends to    {peers}{repeats}; {_weights(graph)}"
    uniform = _one_weight(graph)
    shown = range(min(graph.period, _STEPS))
    rows = [["replica", *(f"step {step}" for step in shown)]]
    for index in range(min(graph.replicas, _ROWS)):
        rows.append([str(index), *(_targets(graph, step, index, uniform) for step in shown)])
    left = [
        f"{number} more {noun}"
        for number, noun in ((graph.replicas - _ROWS, "replicas"), (graph.period - _STEPS, "steps"))
        if number > 0
    ]
    lines = [title, textwrap.indent(aligned(rows), "  "), *([f"  ({' and '.join(left)} left out)"] if left else [])]
    return "\n".join(lines)


def _targets(graph: Graph, step: int, index: int, uniform: bool) -> str:
    targets = graph.steps[step].targets(index)
    if len(targets) > 8:
        return f"{len(targets)} others"
    return " ".join(str(to) if uniform else f"{to}:{_number(weight)}" for to, weight in targets) or "-"


def _weights(graph: Graph) -> str:
    if _one_weight(graph):
        return f"everything kept or sent has weight {_number(graph.matrices[0].max())}"
    return "to:weight, the rest is kept"


def _one_weight(graph: Graph) -> bool:
    positive = [matrix[matrix > 0] for matrix in graph.matrices]
    first = positive[0][0]
    return all(abs(weights - first).max() < 1e-12 for weights in positive)


def _number(weight: float) -> str:
    fraction = Fraction(weight).limit_denominator(1000)
    return str(fraction) if abs(float(fraction) - weight) < 1e-12 else f"{weight:.4g}"


def _speed(graph: Graph, overlap: int) -> str:
    lines = []
    if graph.replicas > _ANALYSED:
        lines.append(f"contraction is not computed for more than {_ANALYSED} replicas")
    else:
        found = contraction(graph)
        of, steps = "product" if found.is_doubly_stochastic else "de-biased product", counted(found.period, "step")
        lines += [
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
