"""Gossip with the peers of a graph in each step: Stochastic Gradient Push (1811.10792), OSGP, D-PSGD (1705.09056)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm import log
from colossus.comm.objects import all_gather_object
from colossus.comm.peer_gone import PeerGone
from colossus.comm.peers import Message, PeerLinks
from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.gossip.push_sum import MIX, InFlight, PushSum
from colossus.data_parallel.options.gossip_options import DPSGDOptions, GossipOptions, GraphOptions, SGPOptions
from colossus.data_parallel.parameter_vector import ParameterVector
from colossus.data_parallel.per_replica import PerReplica
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.reduction import ModelParts
from colossus.graphs.graph import Graph, make_graph


class GraphStrategy(PerReplica):
    """The base of strategies whose replicas exchange parameters along the edges of a graph.

    Attributes:
        vector: the trained parameters of this rank.
        links: the links to the other replicas; None where there are none.
    """

    options: GraphOptions
    links: PeerLinks | None = None

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        data, context = self._data_group, parts.context
        self.graph = make_graph(self.options.graph, data.size, self.options.num_targets)
        _require_same(self.graph, context)
        self.vector = ParameterVector([param.detach() for param in self.trained])
        self._reported = 0.0, 0
        if self.stop_agreement is not None:
            timeout, is_pinned = context.timeout.total_seconds(), context.device.type == "cuda"
            self.links = PeerLinks(data, self.vector.nbytes, timeout, pinned=is_pinned)
            self.stop_agreement.while_waiting = self.require_alive

    def receive_from(self, source: int, kind: int, number: int, while_waiting: Callable[[], None]) -> Message:
        """Wait for a message, and return it.

        Raises:
            PeerGone: its sender has died.
        """
        assert self.links is not None
        try:
            return self.links.receive(source, kind, number, while_waiting)
        except PeerGone as error:
            raise _death_of(source, str(error)) from error

    def require_alive(self) -> None:
        """Raise RuntimeError if another replica has died, or has ended before this one."""
        links = self.links
        assert links is not None
        for index in range(links.group.size):
            if index != links.group.index and (reason := links.lost(index)) is not None:
                if links.has_departed(index):
                    raise RuntimeError(
                        f"replica {index} has ended before this one: {links.name(index)} has closed its links. It "
                        f"failed, or, in a loop of your own, did not come to a sync point at which this one waits: all "
                        f"replicas must evaluate, save and close equally often"
                    )
                raise _death_of(index, f"{links.name(index)} has gone: {reason}")

    def report(self) -> dict[str, float]:
        if self.links is None:
            return {}
        waited, sent = self._reported
        self._reported = self.links.waited_seconds, self.links.bytes_sent
        return {
            "peer_wait_seconds": self._reported[0] - waited,
            "peer_bytes_sent": float(self._reported[1] - sent),
        }

    def close(self) -> None:
        if self.links is not None:
            self.wait_before_close()
            self.links.close()


def _death_of(replica: int, reason: str) -> PeerGone:
    return PeerGone(f"replica {replica} has died: {reason}. Start the run again from its last checkpoint")


def _require_same(graph: Graph, context: ParallelContext) -> None:
    """Raise ValueError on all ranks unless all have the same matrices. Collective over all ranks."""
    digests = all_gather_object(graph.digest(), context.group(context.grid.names))
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise ValueError(
            f"parallel.strategy.graph: rank {different[0]} has got other matrices than rank 0: every process calls the "
            f"function, and must get the same result. Seed its random numbers with the step or train.seed"
        )


class Gossip(GraphStrategy):
    """The base of strategies that mix by a graph: x <- P x over the replicas, and the push-sum weight w <- P w.

    Between steps the parameters of the model are z = x / w. w stays 1 where the rows of P sum to 1 and no message is in
    flight (`PushSum`). A replica sends its x to all of its peers, and the receiver multiplies by the edge's weight.
    """

    options: GossipOptions

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        self.push_sum = PushSum(self.vector)
        self.in_flight: list[InFlight] = []
        self._saved: Mapping[nn.Parameter, Mapping[str, Any]] = {}

    @property
    def weight(self) -> float:
        """The push-sum weight w."""
        return self.push_sum.weight

    # -- mixing -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def send(self, step: int) -> None:
        """Send x to the peers of step ``step``, and expect their messages."""
        assert self.links is not None
        graph, me = self.graph.at(step), self._data_group.index
        self.push_sum.send(self.links, [to for to, _ in graph.targets(me)], step)
        self.in_flight += [
            InFlight(source, step, step + self.options.delay, float(graph.matrix[me, source]))
            for source in graph.sources(me)
        ]

    @torch.no_grad()
    def mix(self, step: int) -> None:
        """Mix x and w with the messages that are due after step ``step``, and set z."""
        due = [self.receive(message) for message in self.in_flight if message.due <= step]
        self.push_sum.mix(self.graph.at(step).keeps(self._data_group.index), due)
        for message in due:
            self._release(message)
        self.in_flight = [message for message in self.in_flight if message not in due]

    def receive(self, message: InFlight) -> InFlight:
        """Wait for a message, if it has not come yet, and return it."""
        if message.data is None:
            assert self.links is not None
            name, number = self.links.name(message.source), message.sent + 1
            entry = log.record_message(
                f"message of step {number} from {name}", str(self._data_group), number, (self.vector.nbytes,)
            )
            message.fill(self.receive_from(message.source, MIX, message.sent, self._answer_stop))
            entry.done = True
        return message

    def _answer_stop(self) -> None:
        """Post the step after which this replica can stop, where one is requested.

        The replica with the request sends nothing until all have posted. This one acts on the request in the next step,
        or on an accelerator in the one after that.
        """
        assert self.stop_agreement is not None
        self.stop_agreement.answer(self._completed + 3)

    def _release(self, message: InFlight) -> None:
        assert self.links is not None
        self.links.release(message.received)
        message.data = None

    def average_addend(self) -> tuple[list[Tensor], float]:
        return self.push_sum.total([self.receive(message) for message in self.in_flight])

    def report(self) -> dict[str, float]:
        if self.links is None:
            return {}
        return super().report() | {"push_sum_weight": self.weight, "staleness": float(self.options.delay)}

    # -- state --------------------------------------------------------------------------------------------

    def parameter_state(self) -> Mapping[nn.Parameter, Mapping[str, Any]]:
        """Return ``x`` where w is not 1, and the messages in flight, for which this waits."""
        vector = self.vector
        buffers = {} if self.push_sum.x is None else {"x": self.push_sum.x}
        buffers |= {message.name: self.receive(message).received for message in self.in_flight}
        views = {name: vector.views(data) for name, data in buffers.items()}
        return {param: {name: of[index] for name, of in views.items()} for index, param in enumerate(self.trained)}

    def state_dict(self) -> dict[str, Any]:
        messages = [self.receive(message) for message in self.in_flight]
        return {
            "replicas": self._data_group.size,
            "weight": self.weight,
            "in_flight": [
                [message.source, message.sent, message.due, message.share, message.weight] for message in messages
            ],
        }

    def load_parameter_state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Save the state for `load_state_dict`, which has the numbers that belong to it."""
        self._saved = state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state; under another number of replicas, reset w to 1 and drop the messages in flight."""
        for message in self.in_flight:  # a message that came later would have the number of a step that is repeated
            self._release(self.receive(message))
        self.in_flight = []
        self.push_sum.restore(1.0, None)
        saved, self._saved = self._saved, {}
        if not state or state["replicas"] != self._data_group.size or self.links is None:
            return
        of_params = [saved[param] for param in self.trained] if saved else []
        weight, vector = float(state["weight"]), self.vector
        self.push_sum.restore(weight, None if weight == 1.0 else [of_param["x"] for of_param in of_params])
        for numbers in state["in_flight"]:
            message = InFlight(*numbers)
            message.data = self.links.buffer(vector.nbytes)
            for view, of_param in zip(vector.views(message.data), of_params, strict=True):
                view.copy_(of_param[message.name])
            self.in_flight.append(message)


class SGP(Gossip):
    """Stochastic Gradient Push: x <- P x and w <- P w after every step, with a column-stochastic P.

    Gradients are those at z = x / w. The optimizer's update of z, weight decay included, is added to x.

    With ``overlap`` k, a message of step t travels while steps compute, and is mixed in after step t + k:
    x_i <- P_ii(t) x_i + sum_j P_ij(t - k) x_j(t - k), and w likewise, so that it counts messages in flight.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(SGPOptions(**options))

    def after_step(self, step: int) -> None:
        if self.links is not None:
            self.push_sum.take_update()
            self.send(step)
            self.mix(step)


class DPSGD(Gossip):
    """D-PSGD: x <- W x - lr g(x) with a doubly stochastic W (algorithm 1 of the paper).

    Messages travel while the gradients of x are computed. The optimizer steps from W x, and takes its weight decay of
    W x. For W (x - lr g(x)) take `SGP` with the same graph.
    """

    options: DPSGDOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(DPSGDOptions(**options))

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if self.links is not None:
            self.send(step)

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self.links is not None:
            self.mix(self._completed)
        super().step(*args, **kwargs)

    def after_step(self, step: int) -> None:
        if self.links is not None:
            self.push_sum.take_update()
            self.push_sum.debias()
