"""Mixing with peers: what a replica sends, keeps and takes in, step by step."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm import log
from colossus.comm.peers import Message, PeerGone, PeerLinks
from colossus.engine.parameter_store import ParameterStore
from colossus.engine.parameter_vector import ParameterVector
from colossus.engine.parts import ModelParts
from colossus.engine.strategies import optimizer_state
from colossus.engine.strategies.living import Living, Survivors
from colossus.engine.strategies.options.gossip import GossipOptions
from colossus.engine.strategies.per_replica import PerReplica
from colossus.engine.strategies.stop_wave import STOP_BYTES, StopWave
from colossus.graphs.graph import Graph, make_graph
from colossus.graphs.spec import name_of_graph

#: kind of the messages that carry parameters
MIX = 1
_WEIGHT = struct.Struct("<d")
_EPSILON = 2.0**-52


@dataclass(eq=False)
class InFlight:
    """A message that was received or is still awaited: the whole x of its sender, and its push-sum weight.

    Attributes:
        sent, due: numbers of the steps after which it is sent, and taken in.
        share: what the graph gives of it to this replica.
        weight: of the sender; 0 while it travels.
        data: uint8, on the host; None while it travels.
    """

    source: int
    sent: int
    due: int
    share: float
    weight: float = 0.0
    data: Tensor | None = None
    stop: bytes = b""

    def fill(self, received: Message) -> InFlight:
        """It has come."""
        self.data = received.data
        (self.weight,) = _WEIGHT.unpack(received.meta[: _WEIGHT.size])
        self.stop = received.meta[_WEIGHT.size :][:STOP_BYTES]
        return self

    @property
    def name(self) -> str:
        """In checkpoints."""
        return f"in_flight.{self.source}.{self.sent}"


class Gossip(PerReplica):
    """Base of the strategies that mix by a graph: x <- P x over the replicas, and the push-sum weight w <- P w.

    Between steps the parameters of the model are z = x / w. Where w is 1, as it stays where the rows of P sum to 1
    and nothing is in flight, x is the parameters themselves, and is mixed where it lies. What an update adds to z is
    added to x as it is.

    A replica sends its x once, to all of its peers; who takes it in multiplies by the edge's weight.
    """

    options: GossipOptions
    stops_by_store = False

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        data = self._data_group
        self.graph = make_graph(self.options.graph, data.size, self.options.peers)
        self.params = [param.detach() for param in store.trainable()]
        self.vector = ParameterVector(self.params)
        self.weight = 1.0
        self.in_flight: list[InFlight] = []
        #: x where w is not 1, as bytes of `vector`
        self._x: Tensor | None = None
        self._on_device: Tensor | None = None
        self._saved: Mapping[nn.Parameter, Mapping[str, Any]] = {}
        #: seconds waited and bytes sent before the step that runs, and the push-sum weights that are known of it
        self._before, self.weights = (0.0, 0), (1.0,)
        self.links: PeerLinks | None = None
        if data.size > 1:
            timeout = parts.context.timeout.total_seconds()
            more = optimizer_state.most_bytes(self.params) if self.options.mix_optimizer_state else 0
            self.links = PeerLinks(data, self.vector.nbytes + more, timeout)
        # a wish of this step is in the messages of the next
        self.stop_wave = StopWave(1 + self.graph.largest_lead(self.options.travels))
        self.living = self._make_living()

    def _make_living(self) -> Living:
        """Who lives: where nobody may die, all."""
        if self.links is None or self.options.on_death == "stop":
            return Living(self.parts.context, self.graph)

        def answer() -> dict[str, Any]:
            return {"stop": self.stop_wave.known}

        def agreed(answers: Sequence[Mapping[str, Any]], start: int, graph: Graph) -> None:
            known = [each["stop"] for each in answers if each["stop"] is not None]
            # wishes of steps before it travel by the graph before it
            behind = start - min(each["step"] for each in answers)
            self.stop_wave.agree(known, start - 1, 1 + behind + graph.largest_lead(self.options.travels))

        return Survivors(
            self.parts.context,
            self.graph,
            self.links,
            name=name_of_graph(self.options.graph) or "the same matrices",
            problems=self.options.problems_of,
            kind=MIX,
            answer=answer,
            agreed=agreed,
            mass=lambda: self.share_weight,
        )

    def come_together(self) -> None:
        self.in_flight = self.living.meet(self.in_flight)

    @property
    def share_weight(self) -> float:
        """Of `share`: push-sum weight here and in flight to here, all of which has come."""
        return self.weight + sum(each.share * self.receive(each).weight for each in self.in_flight)

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    # -- mixing -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def send(self, step: int) -> None:
        """Send x to the peers of step ``step``, and expect what they send."""
        assert self.links is not None
        graph, me = self.living.graph_at(step), self.living.me
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
            state, size = self._optimizer_state(), self.vector.nbytes
            data = self.links.buffer(size + (optimizer_state.num_bytes(state) if state else 0))
            self._write(data[:size])
            if state:
                optimizer_state.pack(state, data[size:])
            meta = _WEIGHT.pack(self.weight) + self.stop_wave.pack()
            self.links.send(list(targets), MIX, step, data, meta, dtype=self.vector.dtype, owned=True)

    @torch.no_grad()
    def mix(self, step: int) -> None:
        """x and w become what this replica keeps of them and what is due after step ``step``; z follows."""
        self.in_flight = self.living.settle(step, self.in_flight)
        kept = self.living.graph_at(step).keeps(self.living.me)
        due = [self.receive(message) for message in self.in_flight if message.due <= step]
        for message in due:
            self.stop_wave.hear(message.stop, step)
        self.combine(kept, due)
        self.in_flight = [message for message in self.in_flight if message not in due]

    @torch.no_grad()
    def combine(self, kept: float, due: Sequence[InFlight]) -> None:
        """What is kept of x and w, and messages that have come."""
        self._mix_optimizer_state(kept, due)
        x = self.params if self._x is None else self.vector.parts(self._x)
        if len(due) == 1 and kept + due[0].share == 1.0:  # in one pass
            torch._foreach_lerp_(x, self._operands(due[0]), due[0].share)
        else:
            torch._foreach_mul_(x, kept)
            for message in due:
                torch._foreach_add_(x, self._operands(message), alpha=message.share)
        self.weight = _rounded(kept * self.weight + sum(each.share * each.weight for each in due), self.graph.replicas)
        for message in due:
            self._release(message)
        self._debias()

    def _mix_optimizer_state(self, kept: float, due: Sequence[InFlight]) -> None:
        """The mean of what is kept and what comes, by push-sum weights: what is positive stays so.

        Who has no state of a parameter yet, since its first update was skipped, gives none, and takes none.
        """
        state = self._optimizer_state()
        came = [optimizer_state.unpack(each.data[self.vector.nbytes :], state) for each in due if each.data is not None]
        for number, entries in enumerate(state):
            others = [
                (each.share * each.weight, of_params[number])
                for each, of_params in zip(due, came, strict=True)
                if of_params[number]
            ]
            total = kept * self.weight + sum(weight for weight, _ in others)
            for name, value in entries.items() if others else ():
                value.mul_(kept * self.weight / total)
                for weight, theirs in others:
                    value.add_(theirs[name].to(value.device), alpha=weight / total)

    def _optimizer_state(self) -> list[dict[str, Tensor]]:
        """Of each parameter, where it is mixed."""
        if not self.options.mix_optimizer_state:
            return []
        return optimizer_state.entries_of(self._optimizer, self.store.trainable())

    @torch.no_grad()
    def take_update(self) -> None:
        """Add to x what an update has added to z since `mix`."""
        if self._x is None:
            return
        of_old = 1.0 - 1.0 / self.weight  # x + (z - x / w)
        for x, z in zip(self.vector.views(self._x), self.params, strict=True):
            torch.add(z, x, alpha=of_old, out=x)

    def _debias(self) -> None:
        """z = x / w."""
        if self._x is None:
            if self.weight == 1.0:
                return
            self._x = self.vector.empty()
            self.vector.pack(self._x)
        if self.weight == 1.0:
            self.vector.unpack(self._x)
            self._x = None
            return
        for x, z in zip(self.vector.views(self._x), self.params, strict=True):
            torch.div(x, self.weight, out=z)

    def receive(self, message: InFlight) -> InFlight:
        """Wait for it, if it has not come yet.

        Raises:
            RuntimeError: its sender has died.
        """
        if message.data is None:
            assert self.links is not None
            name, number = self.links.name(message.source), message.sent + 1
            entry = log.record_message(
                f"message of step {number} from {name}", str(self._data_group), number, (self.vector.nbytes,)
            )
            try:
                received = self.links.receive(message.source, MIX, message.sent)
            except PeerGone as error:
                raise RuntimeError(
                    f"replica {message.source} has died: {error}, before replica {self.living.me} had what it "
                    f"takes in of it after step {message.due + 1} (sent after step {number}). Where parallel.strategy "
                    f"has on_death = 'stop', this ends the run: start it again from its last checkpoint"
                ) from error
            entry.done = True
            message.fill(received)
        return message

    def _operands(self, message: InFlight) -> list[Tensor]:
        """A message as x lies: in parts where w is not 1, else by parameter."""
        assert message.data is not None
        data = self._here(message.data[: self.vector.nbytes])
        return self.vector.views(data) if self._x is None else self.vector.parts(data)

    def _write(self, data: Tensor) -> None:
        """Copy x to the host."""
        source = self._x
        if source is None and self.vector.device.type == "cpu":
            self.vector.pack(data)
            return
        if source is None:
            source = self._staging()
            self.vector.pack(source)
        data.copy_(source)

    def _here(self, data: Tensor) -> Tensor:
        """Bytes on the host as bytes on the device of the parameters; valid until the next call."""
        return data if self.vector.device.type == "cpu" else self._staging().copy_(data)

    def _staging(self) -> Tensor:
        if self._on_device is None:
            self._on_device = self.vector.empty()
        return self._on_device

    def _release(self, message: InFlight) -> None:
        assert self.links is not None
        assert message.data is not None
        self.links.release(message.data)
        message.data = None

    def share(self) -> tuple[list[Tensor], float]:
        if self._x is None and not self.in_flight:
            return self.params, self.weight
        total, weight = self.vector.empty(), self.weight
        if self._x is None:
            self.vector.pack(total)
        else:
            total.copy_(self._x)
        for message in self.in_flight:
            data = self.receive(message).data
            assert data is not None
            torch._foreach_add_(
                self.vector.parts(total), self.vector.parts(self._here(data[: self.vector.nbytes])), alpha=message.share
            )
            weight += message.share * message.weight
        return self.vector.views(total), weight

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
        weights = numbers.new_zeros(self._data_group.size)
        weights[self._data_group.index] = self.weight
        total = super().reduce_scalars(step, torch.cat((numbers, weights)))
        numbers, weights = total[: len(numbers)], total[len(numbers) :]
        self.weights = tuple(weights.tolist())
        self.stop_wave.wish(step, float(numbers[3]), is_known_to_all=True)
        return numbers

    def agree_on_stop(self, step: int, requests: float) -> float:
        if self.links is None or self.stop_agreement is not None:
            return super().agree_on_stop(step, requests)
        self.stop_wave.wish(step, requests)
        return self.stop_wave.due(step)

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
        trainable, size, state = self.store.trainable(), self.vector.nbytes, self._optimizer_state()
        pieces: list[dict[str, Tensor]] = [{} for _ in trainable]
        if self._x is not None:
            for piece, view in zip(pieces, self.vector.views(self._x), strict=True):
                piece["x"] = view
        for message in self.in_flight:
            data, name = self.receive(message).data, message.name
            assert data is not None
            for piece, view in zip(pieces, self.vector.views(data[:size]), strict=True):
                piece[name] = view
            for piece, theirs in zip(pieces, optimizer_state.unpack(data[size:], state) if state else (), strict=False):
                piece.update({f"{name}.{entry}": value for entry, value in theirs.items()})
        return dict(zip(trainable, pieces, strict=True))

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
        self.in_flight, self.weight, self._x = [], 1.0, None
        self.stop_wave.forget()
        saved, self._saved = self._saved, {}
        if not state or state["replicas"] != self._data_group.size or self.links is None:
            return
        self.weight = float(state["weight"])
        trainable = self.store.trainable()
        if self.weight != 1.0:
            self._x = self.vector.empty()
            for view, param in zip(self.vector.views(self._x), trainable, strict=True):
                view.copy_(saved[param]["x"])
        for numbers in state["in_flight"]:
            message = InFlight(*numbers)
            message.stop = StopWave(0).pack()
            message.data = self._data_of([saved[param] for param in trainable], message.name)
            self.in_flight.append(message)

    def _data_of(self, saved: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
        """The data of a message, out of what `parameter_state` gave for each parameter."""
        assert self.links is not None
        size, state = self.vector.nbytes, []
        if self.options.mix_optimizer_state:
            of_state = f"{name}."
            state = [{key: of[key] for key in sorted(of) if key.startswith(of_state)} for of in saved]
        data = self.links.buffer(size + (optimizer_state.num_bytes(state) if state else 0))
        for view, of_param in zip(self.vector.views(data[:size]), saved, strict=True):
            view.copy_(of_param[name])
        if state:
            optimizer_state.pack(state, data[size:])
        return data

    def close(self) -> None:
        self.living.close()
        if self.links is not None:
            self.links.close()


def _rounded(weight: float, replicas: int) -> float:
    """1 where it is 1 but for the rounding of as many addends."""
    return 1.0 if abs(weight - 1.0) <= replicas * _EPSILON else weight
