"""Stops of replicas that do not wait for each other: after the same step, wherever the request comes from."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import torch
from helpers.ranks import grid, run_ranks
from torch import Tensor

from colossus.comm import collectives
from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.stop_agreement import StopAgreement
from colossus.engine.results import addend, signal_of


def number(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


class Replica:
    """Steps of a rank whose replicas wait for each other at sync points alone.

    Args:
        pace: seconds of a step.
        requests: step -> signal that this rank gets in it.
        sync_points: steps after which all meet; ``outside`` says that this comes after the step is over, as a save in a
            loop of one's own does, so that none can be told with the sums of the step.
    """

    def __init__(
        self, context: ParallelContext, pace: float, requests: dict[int, int], sync_points: set[int], outside: set[int]
    ) -> None:
        self.context, self.pace, self.requests = context, pace, requests
        self.sync_points, self.outside = sync_points, outside
        self.agreement, self.data = StopAgreement(context), context.group("data")
        self.replica, self.completed, self.requested = context.group(context.replica_axes), 0, 0.0

    def run(self, steps: int) -> tuple[int, int | None]:
        """Steps completed, and the signal that was the reason."""
        while self.completed < steps:
            time.sleep(self.pace)
            if self.completed in self.requests:
                self.requested = addend(self.requests[self.completed])
            numbers = collectives.all_reduce(
                number(self.requested + self.agreement.pending_requests()), self.replica
            ).wait()
            self.completed += 1
            if self.completed in self.sync_points or self.completed == steps:
                self.agreement.enter(self.completed)
                numbers = collectives.all_reduce(numbers, self.data).wait()
                self.agreement.leave(looks=False)
                stops = numbers.item()
            else:
                stops = self.agreement.agree(self.completed, numbers.item())
            if stops:
                self.requested = 0.0
                return self.completed, signal_of(stops)
            if self.completed in self.outside:
                self.agreement.enter(self.completed + 1)
                collectives.all_reduce(number(1.0), self.data).wait()
                self.agreement.leave()
        return self.completed, None


TERM, INT = int(signal.SIGTERM), int(signal.SIGINT)
#: name -> (paces by data rank, requests by rank, sync points, sync points outside of a step)
CASES: dict[str, Any] = {
    "a fast one requests": ((0.002, 0.01), {0: {12: TERM}}, set(), set()),
    "a slow one requests": ((0.002, 0.01), {2: {3: INT}}, set(), set()),
    "all at once": ((0.002, 0.01), {0: {9: TERM}, 1: {9: TERM}, 2: {2: TERM}, 3: {2: TERM}}, set(), set()),
    "while another waits": ((0.001, 0.03), {2: {5: TERM}}, {10}, set()),
    "in a sync point": ((0.001, 0.01), {1: {9: TERM}}, {10}, set()),
    "while another waits outside": ((0.001, 0.03), {2: {5: TERM}}, set(), {10}),
    "right before a sync point outside": ((0.001, 0.01), {0: {9: TERM}}, set(), {10}),
    "after sync points": ((0.002, 0.01), {2: {25: TERM}}, {4, 9}, {5, 17}),
    "one has finished": ((0.0, 0.02), {2: {5: TERM}}, set(), set()),
    "nobody": ((0.001, 0.002), {}, {7}, {3}),
}
STEPS = 40


def _body(context: ParallelContext) -> dict[str, tuple[int, int | None]]:
    data = context.index("data")
    found = {}
    for name, (paces, requests, sync_points, outside) in CASES.items():
        collectives.all_reduce(number(0.0), context.group(context.grid.names)).wait()
        replica = Replica(context, paces[data], requests.get(context.rank, {}), sync_points, outside)
        replica.agreement._sync_points = 1000 * (1 + list(CASES).index(name))  # keys of its own in the store
        found[name] = replica.run(STEPS)
    return found


def test_all_ranks_stop_after_the_same_step_for_the_same_reason() -> None:
    by_rank = run_ranks(4, _body, plan=grid(data=2, tensor=2))
    assert by_rank.count(by_rank[0]) == 4, by_rank
    found = by_rank[0]
    for name, (_, requests, _, _) in CASES.items():
        reasons = {signum for of_rank in requests.values() for signum in of_rank.values()}
        wanted = None if not reasons else TERM if TERM in reasons else INT
        assert found[name][1] == wanted, name
        latest = min((step for of_rank in requests.values() for step in of_rank), default=STEPS - 1)
        assert latest < found[name][0] <= STEPS, name
    assert found["while another waits"][0] == found["in a sync point"][0] == 10
    assert found["while another waits outside"][0] == 11
    assert found["one has finished"][0] == found["nobody"][0] == STEPS


def test_a_replica_that_makes_no_step_is_named() -> None:
    def body(context: ParallelContext) -> tuple[str, int] | None:
        progress: list[float] = []
        agreement = StopAgreement(context, on_progress=lambda: progress.append(time.monotonic()))
        agreement._timeout = 1.5
        if context.index("data"):
            for _ in range(4):  # as long as it makes steps it is waited for
                agreement.pending_requests()
                time.sleep(0.21)
            if context.index("tensor") == 0:
                context.store().set("silent", "")
            return None
        with pytest.raises(RuntimeError) as caught:
            agreement.wait_for_all()
        assert context.store().check(["silent"])
        return str(caught.value), len(progress)

    for found in run_ranks(4, body, plan=grid(data=2, tensor=2))[:2]:  # both ranks of the replica that waits
        told, times = found
        assert "waits for replica 1, but none of these has made a step for 1.5 s" in told
        assert times >= 3  # of the four steps that were made
