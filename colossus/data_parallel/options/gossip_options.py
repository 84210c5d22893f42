"""Options of the strategies that mix with some peers. No torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator

from colossus.config import Config
from colossus.config.plans import describe_sizes
from colossus.data_parallel.options.strategy_options import Count, CountOrZero, PerReplicaOptions
from colossus.graphs.graph import Graph, make_graph
from colossus.graphs.graph_checks import problems_of
from colossus.graphs.spec import make_family, name_of_graph

#: push-sum weights below which a plan is refused: a small classifier on 4 replicas comes back from a spike in its loss
#: at 1/16 and at 1/27 with a large learning rate, at 1/64 with a small one, and never at 1/256
_LEAST_WEIGHT = 0.01


def _graph(spec: Any) -> Any:
    make_family(spec)  # raises for a name or an option that there is not
    return spec


class GraphOptions(PerReplicaOptions):
    """Of all that average along the edges of a graph.

    Attributes:
        needs_doubly_stochastic: rows of its matrices must sum to 1, too.
        needs_bipartite: replicas must be of two sides.
    """

    needs_doubly_stochastic: ClassVar[bool] = False
    needs_bipartite: ClassVar[bool] = False

    #: a name of `GRAPHS`, or dict(type=.., **options); a function (replicas, step) -> matrix; a matrix, or several
    graph: Annotated[Any, AfterValidator(_graph)] = "exponential"

    @property
    def sends_to(self) -> int:
        """To how many others a replica sends in a step."""
        return 1

    @property
    def travels(self) -> int:
        """Steps for which what is sent travels."""
        return 0

    def check(self, config: Config) -> list[str]:
        replicas = config.parallel.data
        assert replicas is not None
        found = super().check(config)
        return found if replicas == 1 else found + self._graph_problems(replicas)

    def _graph_problems(self, replicas: int) -> list[str]:
        key, family = "parallel.strategy.graph", make_family(self.graph)
        named = f"{key} = {name!r}" if (name := name_of_graph(self.graph)) else key
        of_family = family.problems(replicas)
        if of_family:
            return [f"{named} with data {replicas}: {problem}" for problem in of_family]
        peers = [f"parallel.strategy.peers{problem}" for problem in self._peers_problems(replicas)]
        if peers:
            return peers
        try:
            graph = make_graph(family, replicas, self.sends_to)
        except ValueError as error:
            return [f"{named} with data {replicas}: {error}"]
        return [f"{named} with data {replicas}: {problem}" for problem in self.problems_of(graph)]

    def problems_of(self, graph: Graph) -> list[str]:
        """What is wrong with a graph for this strategy."""
        return problems_of(
            graph,
            doubly_stochastic=self.needs_doubly_stochastic,
            bipartite=self.needs_bipartite,
            late=f"overlap = {self.travels}" if self.travels else "",
        )

    def _peers_problems(self, replicas: int) -> list[str]:
        return []


class GossipOptions(GraphOptions):
    """Of all that mix in each step as the graph says."""

    #: to how many others a replica sends in a step
    peers: Count = 1

    @property
    def sends_to(self) -> int:
        return self.peers

    def _peers_problems(self, replicas: int) -> list[str]:
        family = make_family(self.graph)
        if not family.takes_peers:
            if self.peers == 1:
                return []
            name = repr(name_of_graph(self.graph) or "matrices")
            return [f" = {self.peers}: graph {name} itself says to whom replicas send; leave peers out"]
        most = family.most_peers(replicas)
        if self.peers >= replicas:
            return [f" = {self.peers}: of data {replicas} replicas each has {replicas - 1} others; at most {most}"]
        if self.peers > most:
            name = name_of_graph(self.graph)
            return [f" = {self.peers}: graph {name!r} with data {replicas} has at most {most} in a step"]
        return []


class SGPOptions(GossipOptions):
    #: steps for which what is sent travels
    overlap: CountOrZero = 0

    @property
    def travels(self) -> int:
        return self.overlap

    def problems_of(self, graph: Graph) -> list[str]:
        """Also an overlap in which a replica gives nearly all away before anything comes: an update of z = x / w grows
        as its weight w falls."""
        problems = super().problems_of(graph)
        kept = min(float(step.matrix.diagonal().min()) for step in graph.steps)
        if not problems and self.overlap and kept**self.overlap < _LEAST_WEIGHT:
            problems.append(
                f"with overlap = {self.overlap} a replica that keeps {kept:.3g} of its own in a step has a push-sum "
                f"weight of {kept**self.overlap:.2g} before messages come, and training does not recover below "
                f"{_LEAST_WEIGHT:g}: take a smaller overlap, or let replicas send to fewer"
            )
        return problems


class DPSGDOptions(GossipOptions):
    needs_doubly_stochastic: ClassVar[bool] = True

    #: W x - lr g(x), whose messages travel while the step computes, or W (x - lr g(x))
    order: Literal["adapt_while_combine", "adapt_then_combine"] = "adapt_while_combine"


class ADPSGDOptions(GraphOptions):
    """A replica averages parameters with one other at a time, which it picks among its neighbours in the graph."""

    needs_doubly_stochastic: ClassVar[bool] = True
    needs_bipartite: ClassVar[bool] = True

    graph: Annotated[Any, AfterValidator(_graph)] = "bipartite_exponential"

    def check(self, config: Config) -> list[str]:
        parallel = config.parallel
        if parallel.pipeline.size * parallel.sequence.size * parallel.tensor.size > 1:
            return [
                f"parallel.strategy.type = 'ad-psgd': a replica is one rank, but the plan is "
                f"{describe_sizes(parallel)}; 'sgp' and 'd-psgd' take replicas of several ranks"
            ]
        return super().check(config)
