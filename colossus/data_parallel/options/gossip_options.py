"""The options of strategies that mix with some peers. No torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator

from colossus.config import Config
from colossus.config.plans import describe_sizes
from colossus.data_parallel.options.strategy_options import Count, CountOrZero, PerReplicaOptions
from colossus.graphs.graph import make_graph
from colossus.graphs.graph_checks import problems_of
from colossus.graphs.spec import make_family, name_of_graph


def _graph(spec: Any) -> Any:
    make_family(spec)  # raises for an unknown name or option
    return spec


class GraphOptions(PerReplicaOptions):
    """The options of strategies that average along the edges of a graph.

    Attributes:
        needs_doubly_stochastic: whether the rows of its matrices must sum to 1, too.
        needs_bipartite: whether the graph must be bipartite.
    """

    needs_doubly_stochastic: ClassVar[bool] = False
    needs_bipartite: ClassVar[bool] = False

    #: a name of `GRAPHS`, or dict(type=.., **options); a function (replicas, step) -> matrix; a matrix, or several
    graph: Annotated[Any, AfterValidator(_graph)] = "exponential"

    @property
    def num_targets(self) -> int:
        """The number of replicas to which a replica sends in a step."""
        return 1

    @property
    def delay(self) -> int:
        """The number of steps between sending a message and mixing it in."""
        return 0

    def check(self, config: Config) -> list[str]:
        replicas, problems = config.parallel.data, super().check(config)
        assert replicas is not None
        if replicas == 1:
            return problems
        try:
            graph_problems = problems_of(
                make_graph(self.graph, replicas, self.num_targets),
                doubly_stochastic=self.needs_doubly_stochastic,
                bipartite=self.needs_bipartite,
                late=f"overlap = {self.delay}" if self.delay else "",
            )
        except (TypeError, ValueError) as error:
            graph_problems = [str(error)]
        named = f" = {name!r}" if (name := name_of_graph(self.graph)) else ""
        graph = f"parallel.strategy.graph{named} with data {replicas}"
        return problems + [f"{graph}: {problem}" for problem in graph_problems]


class GossipOptions(GraphOptions):
    """The options of strategies that mix by the graph in each step."""

    #: the number of replicas to which a replica sends in a step
    peers: Count = 1

    @property
    def num_targets(self) -> int:
        return self.peers


class SGPOptions(GossipOptions):
    #: the number of steps between sending a message and mixing it in
    overlap: CountOrZero = 0

    @property
    def delay(self) -> int:
        return self.overlap


class DPSGDOptions(GossipOptions):
    needs_doubly_stochastic: ClassVar[bool] = True


class ADPSGDOptions(GraphOptions):
    """The options of AD-PSGD, whose replicas average with one neighbour in the graph at a time."""

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
