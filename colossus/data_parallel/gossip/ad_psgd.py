"""AD-PSGD (1710.06952): replicas average in pairs while they compute, and nobody waits for a slow one."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from colossus.comm.peers import PeerGone, PeerLinks
from colossus.data_parallel.gossip.gossip import death_of, require_alive, require_same_graph
from colossus.data_parallel.gossip.pair_answers import ANSWER, REQUEST, PairAnswers
from colossus.data_parallel.options.gossip_options import ADPSGDOptions
from colossus.data_parallel.parameter_vector import ParameterVector
from colossus.data_parallel.per_replica import PerReplica
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.reduction import ModelParts
from colossus.graphs.graph import Graph, make_graph
from colossus.graphs.graph_checks import two_sides

#: seconds between two looks of a replica that waits for others
_POLL = 0.005


class Exchange(NamedTuple):
    """An average with a passive replica that is under way.

    Attributes:
        number: of those that this replica has begun, from 0.
        step: steps that it had completed then.
    """

    passive: int
    number: int
    step: int


class ADPSGD(PerReplica):
    """Pairwise averaging on a bipartite graph, by increments of half a difference.

    Replicas are *active* or *passive*. At the boundary of a step an active one sends its x_i to a passive neighbour,
    which answers at once, in the midst of a step, with d = (x_i - x_j) / 2, and answers the next as if it had d
    already. The passive one adds what it has promised at its next boundary, the active one subtracts d at the first
    boundary after the answer has come; gradients may be stale.

    An active replica has one exchange under way, so each is an average of two replicas, one after the other, in the
    order in which they were answered. With k under way it would give away half of itself k times:
    x(t + 1) = x(t) - (x(t - k) - x_j) / 2, which diverges for k > 2.

    Not reproducible: who averages with whom in which order depends on who is how fast. A replica is one rank.

    Attributes:
        num_exchanges: that this replica has begun.
        record: what this replica does, in order, where it is a list: ("step", completed) once its own update is made;
            ("begin", passive, number), ("apply", passive, number) of an active one; ("answer", active, number), and
            ("boundary",) where it adds what it has answered, of a passive one.
    """

    options: ADPSGDOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(ADPSGDOptions(**options))
        self.record: list[tuple[Any, ...]] | None = None

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        data, context = self._data_group, parts.context
        self.vector = ParameterVector(self.trained)
        #: of an active replica: its neighbours, and how often each is picked
        self._neighbours: list[int] = []
        self._weights: list[float] = []
        self._seed, self.num_exchanges = context.rng.seed, 0
        self._under_way: Exchange | None = None
        self.answers: PairAnswers | None = None
        self.links: PeerLinks | None = None
        #: of each exchange applied in this step, the steps since it was begun
        self._applied: list[int] = []
        self._reported = 0.0, 0
        if data.size == 1:
            return
        graph = make_graph(self.options.graph, data.size, self.options.sends_to)
        require_same_graph(graph, context)
        timeout = context.timeout.total_seconds()
        self.links = links = PeerLinks(data, self.vector.nbytes, timeout, pinned=context.device.type == "cuda")
        assert self.stop_agreement is not None
        self.stop_agreement.while_waiting = lambda: require_alive(links)
        self._num_meetings = 0
        self._meet()  # all have connections then, by which a death is seen
        weights = _weights(graph)
        sides = two_sides(weights > 0)
        assert sides is not None
        if data.index in sides[0]:
            self._neighbours = [index for index in sides[1] if weights[index, data.index]]
            self._weights = [float(weights[index, data.index]) for index in self._neighbours]
        else:
            self.answers = PairAnswers(self.links, self.vector, self._note)

    # -- a step -------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if self.answers is not None:
            self.answers.open()

    def after_step(self, step: int) -> None:
        if self.links is None:
            return
        self._completed, self._applied = step + 1, []
        require_alive(self.links)
        self._note("step", self._completed)
        if self.answers is not None:
            self._applied = [1] * self.answers.pass_boundary()
        elif self._under_way is None or self.links.has_come(ANSWER):
            self._apply_answer()
            self._begin_exchange()

    def _begin_exchange(self) -> None:
        """With whom is a function of the seed, the replica and the number of the exchange."""
        assert self.links is not None
        draw = random.Random(f"{self._seed}/{self._data_group.index}/{self.num_exchanges}")
        (passive,) = draw.choices(self._neighbours, self._weights)
        self._under_way = exchange = Exchange(passive, self.num_exchanges, self._completed)
        self.num_exchanges += 1
        self._note("begin", passive, exchange.number)
        data = self.links.buffer(self.vector.nbytes)
        self.vector.pack(data)
        self.links.send(passive, REQUEST, exchange.number, data, dtype=self.vector.dtype, owned=True)

    def _apply_answer(self) -> None:
        """Wait for the answer that is under way, and subtract it."""
        assert self.links is not None
        exchange, self._under_way = self._under_way, None
        if exchange is None:
            return
        try:
            message = self.links.receive(exchange.passive, ANSWER, exchange.number)
        except PeerGone as error:
            raise death_of(exchange.passive, str(error)) from error
        self.vector.add(message.data, alpha=-1.0)
        self.links.release(message.data)
        self._note("apply", exchange.passive, exchange.number)
        self._applied.append(self._completed - exchange.step)

    def _note(self, *what: Any) -> None:
        if self.record is not None:
            self.record.append(what)

    # -- where all meet -----------------------------------------------------------------------------------

    def come_together(self) -> None:
        """Apply what is under way, and wait until all have: then nothing is under way on any replica."""
        super().come_together()
        self._apply_answer()  # which comes without anybody having to meet: threads answer
        self._meet()
        if self.answers is not None:
            self._applied += [0] * self.answers.pass_boundary()
            self.answers.shut()

    def _meet(self) -> None:
        """A barrier without a time limit as long as others go on: a replica may be many steps behind.

        Raises:
            RuntimeError: one of them has died.
        """
        links, store, began = self.links, self.parts.context.store(), time.monotonic()
        assert links is not None
        assert self.stop_agreement is not None
        self._num_meetings += 1
        keys = {index: f"arrived/{self._num_meetings}/{index}" for index in range(links.group.size)}
        store.set(keys[links.group.index], "")
        self.stop_agreement.watch([])
        while missing := [index for index, key in keys.items() if not store.check([key])]:
            require_alive(links)
            self.stop_agreement.watch(missing)
            time.sleep(_POLL)
        links.waited_seconds += time.monotonic() - began

    # -- besides ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"exchanges": self.num_exchanges}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_exchanges = int(state.get("exchanges", 0))

    def report(self) -> dict[str, float]:
        if self.links is None:
            return {}
        waited, sent = self._reported
        self._reported = self.links.waited_seconds, self.links.bytes_sent
        count = len(self._applied)
        return {
            "exchanges": float(count),
            **({"staleness": sum(self._applied) / count} if count else {}),
            "peer_wait_seconds": self._reported[0] - waited,
            "peer_bytes_sent": float(self._reported[1] - sent),
        }

    def close(self) -> None:
        if self.links is None:
            return
        self.part()
        if self.answers is not None:
            self.answers.close()
        self.links.close()


def _weights(graph: Graph) -> np.ndarray:
    """[replicas, replicas]: how much each gives to each other in a period."""
    total = np.sum(graph.matrices, axis=0)
    np.fill_diagonal(total, 0.0)
    return total
