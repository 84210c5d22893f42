"""Gossip whose messages are taken in as they come, and never waited for (1811.10792, without its bound)."""

from __future__ import annotations

import time
from collections import deque

import torch

from colossus.comm import collectives
from colossus.data_parallel.gossip.arrivals import Arrivals, require_alive
from colossus.data_parallel.gossip.gossip import Gossip
from colossus.data_parallel.gossip.in_flight import MIX, InFlight

#: kind of the messages that say how many of a sender's were taken in so far
TAKEN = 2
#: messages to a replica that it has not taken in; what more would be for it the sender keeps
MOST_AHEAD = 4
#: of the weight of a step's graph that a replica keeps: what it must have left, with what comes, to send anything
LEAST_LEFT = 0.5


class Eager:
    """After each step a replica adds all that has come, and sends to the peers that keep up.

    A peer that has not taken in the last `MOST_AHEAD` messages gets none, so that the memory of who sleeps has a bound.
    And a replica to which little comes gives nothing away: updates are not scaled by its push-sum weight w, so that a
    small one would make them large in z = x / w. It keeps w >= `LEAST_LEFT` times what the graph lets it keep of 1.
    What is not sent stays with the sender: no mass is lost.

    The first rank of a replica decides what is taken in and what is sent, and the others do the same. They wait only
    for their part of messages whose first part has come, which their senders send without waiting for anything that is
    not older: as in `pair_protocol`, nothing can wait for itself.
    """

    def __init__(self, gossip: Gossip) -> None:
        assert gossip.links is not None
        self._gossip, self._links = gossip, gossip.links
        context = gossip.parts.context
        self._replica, self._device = context.group(context.replica_axes), context.device
        self._timeout = context.timeout.total_seconds()
        assert gossip.stop_agreement is not None
        self._arrivals = Arrivals(self._links, gossip.stop_agreement.watch)
        size = self._links.group.size
        #: by peer, in the order in which it has sent them
        self._came: list[deque[InFlight]] = [deque() for _ in range(size)]
        #: by peer: messages sent to it and taken in by it, and its own that were taken in here
        self._sent, self._acknowledged, self._taken = [0] * size, [0] * size, [0] * size
        #: of what was taken in in this step: its number minus that of the sender's
        self._ages: list[int] = []

    def report(self) -> dict[str, float]:
        """Of a step: how many messages were taken in, and how many steps of this replica's and their sender's old."""
        of_ages = {"staleness": sum(self._ages) / len(self._ages)} if self._ages else {}
        return {"exchanges": float(len(self._ages)), **of_ages}

    def exchange(self, step: int) -> None:
        """After the update of step ``step``."""
        gossip, me = self._gossip, self._links.group.index
        require_alive(self._links)
        self._ages = []
        graph = gossip.graph.at(step)
        targets = graph.targets(me)
        self._take()
        for message in self._links.take(TAKEN):
            self._acknowledged[message.source] = max(self._acknowledged[message.source], message.number)
        counts = [len(came) for came in self._came]
        left = graph.keeps(me) * gossip.weight + sum(each.share * each.weight for came in self._came for each in came)
        gives = left >= LEAST_LEFT * graph.keeps(me)
        keeps_up = [gives and self._sent[to] - self._acknowledged[to] < MOST_AHEAD for to, _ in targets]
        decided = self._told([*counts, *map(int, keeps_up)])
        counts, keeps_up = decided[: len(counts)], [bool(each) for each in decided[len(counts) :]]
        gossip.post(step, [to for (to, _), keeps in zip(targets, keeps_up, strict=True) if keeps])
        kept = graph.keeps(me)
        for (to, share), keeps in zip(targets, keeps_up, strict=True):
            self._sent[to] += keeps
            kept += 0.0 if keeps else share
        self._add(step, kept, counts)
        if self._replica.index == 0:
            for source, count in enumerate(counts):
                if count:
                    self._links.send(source, TAKEN, self._taken[source])

    def drain(self, step: int) -> None:
        """Where all replicas meet: wait for them, and take in all that was sent."""
        self._arrivals.wait()
        self._take()
        self._add(step, 1.0, [len(came) for came in self._came])
        self._acknowledged = list(self._sent)  # they do the same

    def _take(self) -> None:
        graph, me = self._gossip.graph, self._links.group.index
        for message in self._links.take(MIX):
            source, sent = message.source, message.number
            share = float(graph.at(sent).matrix[me, source])
            self._came[source].append(InFlight(source, sent, sent, share).fill(message))

    def _add(self, step: int, kept: float, counts: list[int]) -> None:
        """The oldest messages of each peer, so many."""
        due: list[InFlight] = []
        for source, count in enumerate(counts):
            self._wait_for(source, count)
            due += [self._came[source].popleft() for _ in range(count)]
            self._taken[source] += count
        self._ages += [step - message.sent for message in due]
        self._gossip.combine(kept, due)

    def _wait_for(self, source: int, count: int) -> None:
        """Until as many messages of a peer are here as the first rank of this replica has got.

        Raises:
            RuntimeError: a replica has died, or was silent for too long.
        """
        began = time.monotonic()
        while len(self._came[source]) < count:
            require_alive(self._links)
            if time.monotonic() - began > self._timeout:
                raise RuntimeError(
                    f"timeout: {self._links.name(source)} did not send within {self._timeout:g} s what the same "
                    f"replica has sent to the first rank of this one"
                )
            self._links.wait(1.0, lambda: self._links.has_come(MIX))
            self._take()

    def _told(self, numbers: list[int]) -> list[int]:
        """What the first rank of the replica says, on all of them."""
        if self._replica.size == 1:
            return numbers
        return [int(x) for x in collectives.broadcast(torch.tensor(numbers, device=self._device), self._replica, 0)]
