"""Mixing with peers: what a replica sends, keeps and takes in, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm import log
from colossus.comm.peers import PeerGone, PeerLinks
from colossus.data_parallel.gossip import optimizer_state
from colossus.data_parallel.gossip.in_flight import MIX, InFlight, meta_of
from colossus.data_parallel.gossip.push_sum import PushSum
from colossus.data_parallel.gossip.same_graph import require_same_graph
from colossus.data_parallel.gossip.stop_in_messages import StopInMessages
from colossus.data_parallel.options.gossip import GossipOptions
from colossus.data_parallel.per_replica import PerReplica
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.reduction import ModelParts
from colossus.graphs.graph import make_graph


class Gossip(PerReplica):
    """Base of the strategies that mix by a graph: x <- P x over the replicas, and the push-sum weight w <- P w.

    Between steps the parameters of the model are z = x / w; w stays 1 where the rows of P sum to 1 and nothing is in
    flight (`PushSum`). A replica sends its x once, to all of its peers; who takes it in multiplies by the edge's
    weight.
    """

    options: GossipOptions
    stops_by_store = False

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        data = self._data_group
        self.graph = make_graph(self.options.graph, data.size, self.options.peers)
        require_same_graph(self.graph, parts.context)
        self.push_sum = PushSum([param.detach() for param in self.trained])
        self.in_flight: list[InFlight] = []
        self._saved: Mapping[nn.Parameter, Mapping[str, Any]] = {}
        #: seconds waited and bytes sent before the step that runs, and the push-sum weights that are known of it
        self._before, self.weights = (0.0, 0), (1.0,)
        self.links: PeerLinks | None = None
        if data.size > 1:
            timeout = parts.context.timeout.total_seconds()
            most = self._size
            if self.options.mix_optimizer_state:
                most += optimizer_state.most_bytes(self.push_sum.params)
            self.links = PeerLinks(data, most, timeout, pinned=parts.context.device.type == "cuda")
        # a request of this step is in the messages of the next
        self.stop_in_messages = StopInMessages(self.graph.largest_lead(self.options.travels))

    @property
    def weight(self) -> float:
        """w."""
        return self.push_sum.weight

    @property
    def _size(self) -> int:
        """Bytes of x in a message; the optimizer's state follows."""
        return self.push_sum.vector.nbytes

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    # -- mixing -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def send(self, step: int) -> None:
        """Send x to the peers of step ``step``, and expect what they send."""
        assert self.links is not None
        graph, me = self.graph.at(step), self._data_group.index
        self.post(step, [to for to, _ in graph.targets(me)])
        self.in_flight += [
            InFlight(source, step, step + self.options.travels, float(graph.matrix[me, source]))
            for source in graph.sources(me)
        ]

    @torch.no_grad()
    def post(self, step: int, targets: Sequence[int]) -> None:
        """Send x to these."""
        assert self.links is not None
        if targets:
            state, size = self._optimizer_state(), self._size
            data = self.links.buffer(size + (optimizer_state.num_bytes(state) if state else 0))
            self.push_sum.write(data[:size])
            if state:
                optimizer_state.pack(state, data[size:])
            meta = meta_of(self.weight, self.stop_in_messages)
            vector = self.push_sum.vector
            self.links.send(list(targets), MIX, step, data, meta, dtype=vector.dtype, owned=True)

    @torch.no_grad()
    def mix(self, step: int) -> None:
        """x and w become what this replica keeps of them and what is due after step ``step``; z follows."""
        due = [self.receive(message) for message in self.in_flight if message.due <= step]
        for message in due:
            self.stop_in_messages.hear(message.stop, step)
        self.combine(self.graph.at(step).keeps(self._data_group.index), due)
        self.in_flight = [message for message in self.in_flight if message not in due]

    @torch.no_grad()
    def combine(self, kept: float, due: Sequence[InFlight]) -> None:
        """What is kept of x and w, and messages that have come."""
        if state := self._optimizer_state():
            others = [(each.share * each.weight, each.received[self._size :]) for each in due]
            optimizer_state.mix(state, kept * self.weight, others)
        self.push_sum.mix(kept, [each.addend for each in due])
        for message in due:
            self._release(message)

    def _optimizer_state(self) -> list[dict[str, Tensor]]:
        """Of each parameter, where it is mixed."""
        if not self.options.mix_optimizer_state:
            return []
        return optimizer_state.entries_of(self._optimizer, self.trained)

    def receive(self, message: InFlight) -> InFlight:
        """Wait for it, if it has not come yet.

        Raises:
            RuntimeError: its sender has died.
        """
        if message.data is None:
            assert self.links is not None
            name, number = self.links.name(message.source), message.sent + 1
            entry = log.record_message(
                f"message of step {number} from {name}", str(self._data_group), number, (self._size,)
            )
            try:
                received = self.links.receive(message.source, MIX, message.sent)
            except PeerGone as error:
                raise RuntimeError(
                    f"replica {message.source} has died: {error}, before replica {self._data_group.index} had what it "
                    f"takes in of it after step {message.due + 1} (sent after step {number}). Start the run "
                    f"again from its last checkpoint"
                ) from error
            entry.done = True
            message.fill(received)
        return message

    def _release(self, message: InFlight) -> None:
        assert self.links is not None
        self.links.release(message.received)
        message.data = None

    def average_addend(self) -> tuple[list[Tensor], float]:
        return self.push_sum.total([self.receive(message).addend for message in self.in_flight])

    # -- a step -------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if self.links is not None:
            self._before = self.links.waited_seconds, self.links.bytes_sent
            self.weights = (self.weight,)

    def reduce_scalars(self, step: int, numbers: Tensor) -> Tensor:
        """Those of all replicas come with their push-sum weights, which `report` tells the bounds of."""
        self.weights = (self.weight,)
        if self.links is None or not self.is_summed(step):
            return super().reduce_scalars(step, numbers)
        weights = numbers.new_zeros(self.graph.replicas)
        weights[self._data_group.index] = self.weight
        total = super().reduce_scalars(step, torch.cat((numbers, weights)))
        numbers, weights = total[: len(numbers)], total[len(numbers) :]
        self.weights = tuple(weights.tolist())
        self.stop_in_messages.request(step, float(numbers[3]), is_known_to_all=True)
        return numbers

    def agree_on_stop(self, step: int, requests: float) -> float:
        if self.links is None or self.stop_agreement is not None:
            return super().agree_on_stop(step, requests)
        self.stop_in_messages.request(step, requests)
        return self.stop_in_messages.due(step)

    def report(self) -> dict[str, float]:
        if self.links is None:
            return {}
        waited, sent = self._before
        return {
            "push_sum_min": min(self.weights),
            "push_sum_max": max(self.weights),
            "staleness": float(self.options.travels),
            "peer_wait_seconds": self.links.waited_seconds - waited,
            "peer_bytes_sent": float(self.links.bytes_sent - sent),
        }

    # -- state --------------------------------------------------------------------------------------------

    def parameter_state(self) -> Mapping[nn.Parameter, Mapping[str, Any]]:
        """``x`` where w is not 1, and each message in flight, which is received for that."""
        trained, size, state = self.trained, self._size, self._optimizer_state()
        pieces: list[dict[str, Tensor]] = [{} for _ in trained]
        vector = self.push_sum.vector
        if self.push_sum.x is not None:
            for piece, view in zip(pieces, vector.views(self.push_sum.x), strict=True):
                piece["x"] = view
        for message in self.in_flight:
            data, name = self.receive(message).received, message.name
            for piece, view in zip(pieces, vector.views(data[:size]), strict=True):
                piece[name] = view
            for piece, theirs in zip(pieces, optimizer_state.unpack(data[size:], state) if state else (), strict=False):
                piece.update({f"{name}.{entry}": value for entry, value in theirs.items()})
        return dict(zip(trained, pieces, strict=True))

    def state_dict(self) -> dict[str, Any]:
        messages = [self.receive(message) for message in self.in_flight]
        return {
            "replicas": self._data_group.size,
            "weight": self.weight,
            "in_flight": [[each.source, each.sent, each.due, each.share, each.weight] for each in messages],
        }

    def load_parameter_state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Kept until `load_state_dict`, which has the numbers to it."""
        self._saved = state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Another number of replicas begins anew: with the parameters that it was given, and nothing in flight."""
        for message in self.in_flight:  # what comes later has the number of a step that is made again
            self._release(self.receive(message))
        self.in_flight = []
        self.push_sum.restore(1.0, None)
        self.stop_in_messages.restart()
        saved, self._saved = self._saved, {}
        if not state or state["replicas"] != self._data_group.size or self.links is None:
            return
        of_params = [saved[param] for param in self.trained] if saved else []
        weight = float(state["weight"])
        self.push_sum.restore(weight, None if weight == 1.0 else [of_param["x"] for of_param in of_params])
        for numbers in state["in_flight"]:
            message = InFlight(*numbers)
            message.stop = StopInMessages(0).pack()
            message.data = self._data_of(of_params, message.name)
            self.in_flight.append(message)

    def _data_of(self, saved: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
        """The data of a message, out of what `parameter_state` gave for each parameter."""
        assert self.links is not None
        size, state = self._size, []
        if self.options.mix_optimizer_state:
            of_state = f"{name}."
            state = [{key: of[key] for key in sorted(of) if key.startswith(of_state)} for of in saved]
        data = self.links.buffer(size + (optimizer_state.num_bytes(state) if state else 0))
        for view, of_param in zip(self.push_sum.vector.views(data[:size]), saved, strict=True):
            view.copy_(of_param[name])
        if state:
            optimizer_state.pack(state, data[size:])
        return data

    def close(self) -> None:
        if self.links is not None:
            self.links.close()
