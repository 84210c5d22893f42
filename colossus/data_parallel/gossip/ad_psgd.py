"""AD-PSGD (1710.06952): replicas average in pairs while they compute, and nobody waits for a slow one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from colossus.comm import collectives
from colossus.comm.peers import PeerGone, PeerLinks
from colossus.data_parallel.gossip.arrivals import Arrivals, death_of, require_alive
from colossus.data_parallel.gossip.pair_answers import ANSWER, REQUEST, PairAnswers
from colossus.data_parallel.gossip.pair_protocol import ActiveSide
from colossus.data_parallel.gossip.same_graph import require_same_graph
from colossus.data_parallel.options.gossip import ADPSGDOptions
from colossus.data_parallel.parameter_vector import ParameterVector
from colossus.data_parallel.per_replica import PerReplica
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.reduction import ModelParts
from colossus.graphs.checks import two_sides
from colossus.graphs.graph import Graph, make_graph


class ADPSGD(PerReplica):
    """Pairwise averaging on a bipartite graph, by increments of half a difference; see `pair_protocol`.

    Not reproducible: who averages with whom in which order depends on who is how fast.

    Attributes:
        record: what this replica does, in order, where it is a list (on its first rank): ("step", completed) once its
            own update is made; ("begin", passive, number), ("apply", passive, number) of an active one; ("answer",
            active, number), and ("boundary",) where it adds what it has answered, of a passive one.
    """

    options: ADPSGDOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(ADPSGDOptions(**options))
        self.record: list[tuple[Any, ...]] | None = None

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        data, context = self._data_group, parts.context
        self.vector = ParameterVector(self.trained)
        self.active: ActiveSide | None = None
        self.answers: PairAnswers | None = None
        self.links: PeerLinks | None = None
        self._followers: PeerLinks | None = None
        self._replica_group = context.group(context.replica_axes)
        self._timeout = context.timeout.total_seconds()
        #: of each exchange applied in this step, the steps since it was begun
        self._applied: list[int] = []
        self._reported = (0.0, 0)
        if data.size == 1:
            return
        graph = make_graph(self.options.graph, data.size, self.options.schedule)
        require_same_graph(graph, context)
        is_on_cuda = context.device.type == "cuda"
        self.links = PeerLinks(data, self.vector.nbytes, self._timeout, pinned=is_on_cuda)
        assert self.stop_agreement is not None
        self._arrivals = Arrivals(self.links, self.stop_agreement.watch)
        self.stop_agreement.while_waiting = partial(require_alive, self.links)
        weights = _weights(graph)
        sides = two_sides(weights > 0)
        assert sides is not None
        if data.index in sides[0]:
            neighbours = [(index, weights[index, data.index]) for index in sides[1] if weights[index, data.index]]
            self.active = ActiveSide(data.index, neighbours, context.rng.seed)
            return
        if self._replica_group.size > 1:
            self._followers = PeerLinks(self._replica_group, 0, self._timeout)
        self.answers = PairAnswers(self.links, self._followers, self.vector, self._note)

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
            self._pass_boundary()
        else:
            self._exchange()

    def _pass_boundary(self) -> None:
        """Of a passive replica."""
        assert self.answers is not None
        if self._is_leader:
            count, applied = self.answers.pass_boundary()
            self._told(count)
        else:
            _, applied = self.answers.pass_boundary(self._told(0), self._timeout)
        self._applied += [1] * applied

    def _exchange(self) -> None:
        """Of an active replica: apply the answer if it has come, and begin another exchange."""
        assert self.active is not None
        assert self.links is not None
        has_come = self.active.under_way is None or self.links.has_come(ANSWER)
        if not self._told(int(has_come)):
            return
        self._apply_answer()
        exchange = self.active.begin(self._completed)
        self._note("begin", exchange.passive, exchange.number)
        data = self.links.buffer(self.vector.nbytes)
        self.vector.pack(data)
        self.links.send(exchange.passive, REQUEST, exchange.number, data, dtype=self.vector.dtype, owned=True)

    def _apply_answer(self) -> None:
        """Wait for the answer that is under way, and subtract it."""
        assert self.active is not None
        assert self.links is not None
        if self.active.under_way is None:
            return
        exchange = self.active.complete()
        try:
            message = self.links.receive(exchange.passive, ANSWER, exchange.number)
        except PeerGone as error:
            raise death_of(exchange.passive, error) from error
        self.vector.add(message.data, alpha=-1.0)
        self.links.release(message.data)
        self._note("apply", exchange.passive, exchange.number)
        self._applied.append(self._completed - exchange.step)

    @property
    def _is_leader(self) -> bool:
        return self._replica_group.index == 0

    def _told(self, number: int) -> int:
        """What the first rank of the replica says, on all of them."""
        if self._replica_group.size == 1:
            return number
        told = torch.tensor([number], device=self.parts.context.device)
        return int(collectives.broadcast(told, self._replica_group, 0))

    def _note(self, *what: Any) -> None:
        if self.record is not None:
            self.record.append(what)

    # -- besides ------------------------------------------------------------------------------------------

    def come_together(self) -> None:
        """Apply what is under way, and wait until all have: then nothing is under way on any replica."""
        super().come_together()
        if self.active is not None:
            self._apply_answer()  # which comes without anybody having to meet: threads answer
        self._arrivals.wait()
        if self.answers is not None:
            self._applied += [0] * self.answers.pass_boundary()[1]
            self.answers.shut()

    def state_dict(self) -> dict[str, Any]:
        return {"exchanges": self.active.number} if self.active is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.active is not None:
            self.active.number = int(state.get("exchanges", 0))

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
        if self.links is not None:
            self.part()
        if self.answers is not None:
            self.answers.close()
        for links in (self._followers, self.links):
            if links is not None:
                links.close()


def _weights(graph: Graph) -> np.ndarray:
    """[replicas, replicas]: how much each gives to each other in a period."""
    total = np.sum([graph.at(step).matrix for step in range(graph.phases[0].period)], axis=0)
    np.fill_diagonal(total, 0.0)
    return total
