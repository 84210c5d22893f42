"""Mixing with peers: what a replica sends, keeps and takes in after each step."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from colossus.comm.peers import PeerLinks
from colossus.engine.parameter_store import ParameterStore
from colossus.engine.parameter_vector import ParameterVector
from colossus.engine.parts import ModelParts
from colossus.engine.strategies.options.gossip import GossipOptions
from colossus.engine.strategies.per_replica import PerReplica
from colossus.graphs.graph import StepGraph, make_graph

#: kind of the messages that carry parameters
MIX = 1
_META = struct.Struct("<d")  # the sender's push-sum weight, times the edge's


@dataclass(eq=False)
class InFlight:
    """A message that was received or is still awaited.

    Attributes:
        due: number of the step after which it is taken in.
        data: uint8, None while it travels.
    """

    source: int
    sent: int
    due: int
    weight: float = 0.0
    data: Tensor | None = None


class Gossip(PerReplica):
    """Base of the strategies that mix by a graph: x <- W x over the replicas, and the push-sum weight w <- W w."""

    options: GossipOptions

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        data = self._data_group
        self.graph = make_graph(self.options.graph, data.size, self.options.peers)
        self.vector = ParameterVector(store.trainable())
        self.weight = 1.0
        self.in_flight: list[InFlight] = []
        self.links: PeerLinks | None = None
        if data.size > 1:
            timeout = parts.context.timeout.total_seconds()
            self.links = PeerLinks(data, self.vector.nbytes, timeout)

    @torch.no_grad()
    def send(self, step: int, buffer: Tensor) -> StepGraph:
        """Send this replica's x, in ``buffer``, to those that the graph says: scaled by the edge's weight."""
        assert self.links is not None
        graph, me = self.graph.at(step), self._data_group.index
        by_weight: dict[float, list[int]] = {}
        for to, weight in graph.targets(me):
            by_weight.setdefault(weight, []).append(to)
        for weight, targets in by_weight.items():
            data = self.links.buffer(self.vector.nbytes)
            for scaled, part in zip(self.vector.parts(data), self.vector.parts(buffer), strict=True):
                torch.mul(part, weight, out=scaled)
            meta = _META.pack(weight * self.weight)
            self.links.send(targets, MIX, step, data, meta, dtype=self.vector.dtype, owned=True)
        return graph

    def receive(self, message: InFlight) -> InFlight:
        """Wait for it, if it has not come yet."""
        if message.data is None:
            assert self.links is not None
            received = self.links.receive(message.source, MIX, message.sent)
            message.data, (message.weight,) = received.data, _META.unpack(received.meta)
        return message

    @torch.no_grad()
    def take_in(self, buffer: Tensor, messages: Iterable[InFlight]) -> None:
        """Add what is due, in the order given, to ``buffer`` and to the weight."""
        for message in messages:
            data = self.receive(message).data
            assert data is not None
            for part, added in zip(self.vector.parts(buffer), self.vector.parts(data), strict=True):
                part.add_(added)
            self.weight += message.weight
            assert self.links is not None
            self.links.release(data)
            self.in_flight.remove(message)

    def close(self) -> None:
        if self.links is not None:
            self.links.close()
