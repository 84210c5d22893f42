"""The protocol of AD-PSGD by itself: replicas of several ranks under random schedules, in one process."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any

import pytest

from colossus.data_parallel.gossip.pair_protocol import ActiveSide, Exchange, Order, PassiveSide


class Rank:
    """A rank of the model: one number, a main thread, and on a passive replica a thread that answers.

    A thread is a generator of what it waits for; time passes where it yields.
    """

    def __init__(self, world: World, replica: int, index: int) -> None:
        self.world, self.replica, self.index = world, replica, index
        self.x = Fraction(world.draw.randrange(-100, 100))
        self.updates = Fraction(0)
        self.answers: dict[int, Fraction] = {}
        self.completed = 0
        self.finished = False
        self.exchanges: list[Exchange] = []
        self.active: ActiveSide | None = None
        self.side: PassiveSide[Fraction] | None = None
        if replica in world.passive:
            self.side = PassiveSide(index == 0)
            self.now, self.promised = self.x, Fraction(0)
            self.order: list[tuple[int, int, int]] = []
        else:
            weights = [(passive, 1.0 + passive) for passive in world.passive]
            self.active = ActiveSide(replica, weights, world.seed)

    def main(self) -> Iterator[Callable[[], bool]]:
        for step in range(self.world.steps[self.replica]):
            yield from self.world.barrier(self)  # a collective in the replica: nobody begins a step before the others
            if self.side is not None and not self.side.is_open:
                self.now, self.side.is_open = self.x, True
            yield self.world.may_compute(self)
            update = Fraction(self.world.draw.randrange(-9, 10))
            self.x, self.updates = self.x + update, self.updates + update
            self.completed = step + 1
            yield from self.boundary()
            if self.completed in self.world.sync_points:
                yield from self.sync_point()
        self.completed = max(self.world.steps)
        yield from self.sync_point()
        self.finished = True

    def boundary(self) -> Iterator[Callable[[], bool]]:
        if self.side is not None:
            if self.index == 0:
                count = self.side.num_answered
                self.pass_boundary()
                yield from self.world.told(self, count)
            else:
                count = yield from self.world.told(self, None)
                yield lambda: self.side is not None and self.side.may_pass(count)
                self.pass_boundary()
            return
        assert self.active is not None
        has_come = None
        if self.index == 0:
            has_come = self.active.under_way is None or self.active.under_way.number in self.answers
        if (yield from self.world.told(self, has_come)):
            yield from self.apply()
            exchange = self.active.begin(self.completed)
            self.world.send(self, exchange.passive, self.index, ("request", exchange.number, self.x))

    def apply(self) -> Iterator[Callable[[], bool]]:
        assert self.active is not None
        if (exchange := self.active.under_way) is not None:
            yield lambda: exchange.number in self.answers
            self.x -= self.answers.pop(exchange.number)
            self.exchanges.append(self.active.complete())

    def sync_point(self) -> Iterator[Callable[[], bool]]:
        if self.active is not None:
            yield from self.apply()
        yield from self.world.all_arrive(self)
        if self.side is not None:
            assert self.side.is_idle
            self.pass_boundary()
            self.side.is_open = False
        self.world.met[self.replica, self.index].append((self.x, self.updates))
        yield from self.world.all_arrive(self)

    def pass_boundary(self) -> None:
        assert self.side is not None
        self.x, self.promised = self.x + self.promised, Fraction(0)
        self.now = self.x
        self.side.pass_boundary()

    def get(self, source: int, message: tuple[Any, ...]) -> None:
        kind, *content = message
        if kind == "answer":
            self.answers[content[0]] = content[1]
            return
        assert self.side is not None
        if kind == "request":
            self.side.came(source, *content)
        else:
            self.side.ordered(*content)

    def answer_one(self) -> bool:
        """A turn of the thread."""
        if self.side is None or (found := self.side.answer_next()) is None:
            return False
        order, x = found
        d = (x - self.now) / 2
        self.now, self.promised = self.now + d, self.promised + d
        self.order.append((order.active, order.number, order.boundary))
        if self.index == 0:
            for follower in range(1, self.world.ranks):
                self.world.send(self, self.replica, follower, ("order", order))
        self.world.send(self, order.active, self.index, ("answer", order.number, d))
        return True


class World:
    """All ranks, and first-in-first-out links between any two of them; `run` lets one thing happen at a time."""

    def __init__(self, seed: int) -> None:
        self.draw, self.seed = random.Random(seed), seed
        replicas, self.ranks = self.draw.choice([2, 3, 4, 6]), self.draw.choice([1, 1, 2, 3])
        self.passive = list(range(1, replicas, 2))
        steps = self.draw.randrange(2, 8)
        self.steps = [steps] * replicas
        self.sync_points = {step for step in range(1, steps) if self.draw.random() < 0.2}
        self.sleeps = self.draw.choice([None, *range(replicas)])
        self.links: dict[tuple[int, int, int, int], deque[tuple[Any, ...]]] = {}
        self.tells: dict[tuple[int, int], Any] = {}
        self.came: dict[Any, int] = {}
        self.calls: dict[Any, int] = {}
        self.met: dict[tuple[int, int], list[tuple[Fraction, Fraction]]] = {}
        self.all = [Rank(self, replica, index) for replica in range(replicas) for index in range(self.ranks)]
        for rank in self.all:
            self.met[rank.replica, rank.index] = []
        self.begun = [sum(rank.x for rank in self.all if rank.index == index) for index in range(self.ranks)]

    def _call(self, *key: Any) -> int:
        self.calls[key] = self.calls.get(key, 0) + 1
        return self.calls[key]

    def _arrive(self, size: int, *key: Any) -> Iterator[Callable[[], bool]]:
        self.came[key] = self.came.get(key, 0) + 1
        yield lambda: self.came[key] == size

    def barrier(self, rank: Rank) -> Iterator[Callable[[], bool]]:
        number = self._call("barrier", rank.replica, rank.index)
        yield from self._arrive(self.ranks, "barrier", rank.replica, number)

    def all_arrive(self, rank: Rank) -> Iterator[Callable[[], bool]]:
        """Of the ranks with the same place in their replicas."""
        number = self._call("all", rank.replica, rank.index)
        yield from self._arrive(len(self.steps), "all", rank.index, number)

    def told(self, rank: Rank, value: Any) -> Any:
        """A broadcast in the replica, whose root does not wait."""
        key = rank.replica, self._call("told", rank.replica, rank.index)
        if rank.index == 0:
            self.tells[key] = value
        yield lambda: key in self.tells
        return self.tells[key]

    def may_compute(self, rank: Rank) -> Callable[[], bool]:
        """One replica may sleep until all others have done their steps up to the next sync point."""
        if rank.replica != self.sleeps:
            return lambda: True
        until = min((step for step in self.sync_points if step > rank.completed), default=self.steps[0])
        return lambda: all(other.completed >= until for other in self.all if other.replica != rank.replica)

    def send(self, rank: Rank, replica: int, index: int, message: tuple[Any, ...]) -> None:
        key = rank.replica, rank.index, replica, index
        self.links.setdefault(key, deque()).append(message)

    def run(self) -> None:
        self.mains = {rank: rank.main() for rank in self.all}
        self.waits = {rank: next(main) for rank, main in self.mains.items()}
        threads = [rank.answer_one for rank in self.all if rank.side is not None]
        while self.waits:
            things = [*(partial(self.resume, rank) for rank in self.waits), *threads]
            things += [partial(self.deliver, key) for key, link in self.links.items() if link]
            if any(self.draw.choice(things)() for _ in range(4)):
                continue
            self.draw.shuffle(things)
            assert any(thing() for thing in things), f"deadlock with seed {self.seed}"

    def resume(self, rank: Rank) -> bool:
        """Let a main thread go on, if what it waits for is there."""
        if rank not in self.waits or not self.waits[rank]():
            return False
        try:
            self.waits[rank] = next(self.mains[rank])
        except StopIteration:
            del self.waits[rank]
        return True

    def deliver(self, key: tuple[int, int, int, int]) -> bool:
        """Let the oldest message of a link come."""
        if not self.links[key]:
            return False
        source, _, replica, index = key
        self.all[replica * self.ranks + index].get(source, self.links[key].popleft())
        return True


@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_no_schedule_is_a_deadlock_and_every_average_keeps_the_sum(first: int) -> None:
    num_exchanges, slept = 0, 0
    for seed in range(first, first + 250):
        world = World(seed)
        world.run()
        assert not any(world.links.values())
        for index in range(world.ranks):
            of_all = [rank for rank in world.all if rank.index == index]
            for values in zip(*(world.met[rank.replica, index] for rank in of_all), strict=True):
                assert sum(x for x, _ in values) == world.begun[index] + sum(update for _, update in values)
        for rank in world.all:
            leader = world.all[rank.replica * world.ranks]
            assert rank.exchanges == leader.exchanges
            if rank.active is not None:
                assert rank.active.under_way is None
                assert [each.number for each in rank.exchanges] == list(range(rank.active.number))
                num_exchanges += len(rank.exchanges)
            else:
                assert rank.order == leader.order, f"another order than the leader's with seed {seed}"
        slept += world.sleeps is not None
    assert num_exchanges > 2000
    assert slept > 100


def test_without_the_leaders_order_ranks_of_a_replica_answer_in_other_orders() -> None:
    """That the check above can fail: followers which answer what has come."""

    class OnItsOwn(PassiveSide[Fraction]):
        def __init__(self, is_leader: bool) -> None:
            super().__init__(True)

    differ = 0
    for seed in range(60):
        world = World(seed)
        for rank in world.all:
            if rank.side is not None and rank.index:
                rank.side = OnItsOwn(False)
                rank.side.ordered = lambda order: None  # type: ignore[method-assign]
        world.run()
        leaders = [world.all[rank.replica * world.ranks] for rank in world.all]
        differ += any(
            rank.order != leader.order for rank, leader in zip(world.all, leaders, strict=True) if rank.side is not None
        )
    assert differ > 5


def test_a_follower_holds_back_what_belongs_behind_a_boundary() -> None:
    follower: PassiveSide[str] = PassiveSide(is_leader=False)
    follower.is_open = True
    follower.came(0, 7, "x")
    assert follower.answer_next() is None  # the leader has not said
    follower.ordered(Order(1, 0, 7))
    assert follower.answer_next() is None
    follower.pass_boundary()
    assert follower.answer_next() == (Order(1, 0, 7), "x")
    assert follower.is_idle
    assert not follower.may_pass(2)


def test_whom_an_active_replica_picks_follows_from_the_seed_and_the_weights() -> None:
    def picks(seed: int, weights: tuple[float, ...] = (1.0, 3.0)) -> list[int]:
        side = ActiveSide(0, list(zip((1, 3), weights, strict=True)), seed)
        found = []
        for step in range(400):
            found.append(side.begin(step).passive)
            side.complete()
        return found

    assert picks(5) == picks(5) != picks(6)
    assert 260 < picks(5).count(3) < 340
    goes_on = ActiveSide(0, [(1, 1.0), (3, 3.0)], 5)
    goes_on.number = 200
    assert [goes_on.begin(0).passive] == picks(5)[200:201]
