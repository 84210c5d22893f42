"""Asynchronous pairwise averaging (1710.06952) without its numbers: who averages with whom, in which order. No torch.

The replicas of a bipartite graph are *active* or *passive*. An active one begins an exchange at the boundary of a step:
it sends its x_i to a passive neighbour, which answers at once, in the midst of a step, with d = (x_i - x_j) / 2, and
answers the next as if it had d already. The passive one adds what it has promised at its next boundary, the active one
subtracts d at the first boundary after the answer has come.

An active replica has one exchange under way, so that each is an average of two replicas, one after the other, in the
order in which they were answered; gradients may be stale. With k under way it would give away half of itself k times:
x(t + 1) = x(t) - (x(t - k) - x_j) / 2, which diverges for k > 2.

A replica of several ranks is a leader and those that follow it. Leaders order; a follower does what its leader has
done, and waits for nothing but its part of messages whose first part the leader has got.

Free of deadlock: a follower waits for what its leader did before, and that for parts of messages which their senders
send at boundaries that their leaders have passed. So whatever is waited for was caused by an earlier event of some
leader, and leaders wait for nobody in a step: there is no first event that is never got to.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Request = TypeVar("Request")


@dataclass(frozen=True)
class Exchange:
    """One average of two replicas.

    Attributes:
        active, passive: who began it, and who answers.
        number: of those that ``active`` has begun, from 0.
        step: steps that ``active`` had completed then.
    """

    active: int
    passive: int
    number: int
    step: int


class ActiveSide:
    """The exchanges that a replica begins; on all its ranks alike.

    Whom it picks is a function of the seed, the replica and the number of the exchange.

    Args:
        neighbours: (passive replica, weight), those with a larger weight are picked more often.

    Attributes:
        number: exchanges begun so far.
        under_way: the one that is not applied yet.
    """

    def __init__(self, index: int, neighbours: Sequence[tuple[int, float]], seed: int) -> None:
        self._index, self._seed = index, seed
        self._neighbours = [neighbour for neighbour, _ in neighbours]
        self._weights = [weight for _, weight in neighbours]
        self.number = 0
        self.under_way: Exchange | None = None

    def begin(self, step: int) -> Exchange:
        """At a boundary at which nothing is under way: whom to send x to."""
        assert self.under_way is None
        draw = random.Random(f"{self._seed}/{self._index}/{self.number}")
        (passive,) = draw.choices(self._neighbours, self._weights)
        self.under_way = Exchange(self._index, passive, self.number, step)
        self.number += 1
        return self.under_way

    def complete(self) -> Exchange:
        """The answer is applied."""
        assert self.under_way is not None
        exchange, self.under_way = self.under_way, None
        return exchange


@dataclass(frozen=True)
class Order:
    """A leader's word to its followers: between which boundaries of the replica an exchange is answered."""

    boundary: int
    active: int
    number: int


class PassiveSide(Generic[Request]):
    """The requests that a rank of a passive replica answers.

    A leader answers what has come, oldest first, and its followers the same between the same boundaries: they hold back
    what belongs behind a boundary that they have not passed, and pass none before they have answered what belongs
    before it.

    Attributes:
        is_open: whether anything is answered: not from a sync point of all replicas until the next step begins, since
            parameters may be changed there.
        boundary: boundaries passed so far.
        num_answered: exchanges answered so far.
    """

    def __init__(self, is_leader: bool) -> None:
        self._is_leader = is_leader
        self._requests: dict[tuple[int, int], Request] = {}
        self._orders: deque[Order] = deque()
        self.boundary = self.num_answered = 0
        self.is_open = False

    def came(self, active: int, number: int, request: Request) -> None:
        """A request has come."""
        self._requests[active, number] = request

    def ordered(self, order: Order) -> None:
        """The leader's word has come, in the order in which it was given."""
        self._orders.append(order)

    def answer_next(self) -> tuple[Order, Request] | None:
        """What is to be answered now, if anything is; a leader tells its followers the order."""
        if not self.is_open:
            return None
        if self._is_leader:
            if not self._requests:
                return None
            order = Order(self.boundary, *next(iter(self._requests)))
        else:
            if not self._orders or self._orders[0].boundary > self.boundary:
                return None
            order = self._orders[0]
            assert order.boundary == self.boundary, "a boundary was passed before what belongs before it"
            if (order.active, order.number) not in self._requests:
                return None
            self._orders.popleft()
        self.num_answered += 1
        return order, self._requests.pop((order.active, order.number))

    def may_pass(self, num_answered: int) -> bool:
        """Whether a rank has answered all that its leader had at the boundary it comes to."""
        return self.num_answered >= num_answered

    def pass_boundary(self) -> None:
        self.boundary += 1

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to be answered."""
        return not self._requests and not self._orders
