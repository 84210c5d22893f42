"""The agreement, through the store, of replicas that do not wait for each other on the step after which they stop."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from colossus.comm import collectives
from colossus.comm.peer_gone import PeerGone
from colossus.context.parallel_context import ParallelContext

#: the seconds between two looks at the store
_LOOK_EVERY = 0.2
#: the shortest and the longest pause between two looks of a replica that waits, in seconds
_POLL = (0.005, 0.1)


class StopAgreement:
    """The agreement on a stop: after a request of any rank, all replicas stop after the last step that one completed.

    The replica with the request posts it with the number of its completed steps, and waits until all others have posted
    theirs, which they do when they see the request. Then all see the same numbers, and none is beyond the largest.

    A *sync point* is a place where all replicas wait for each other: a collective over data, an evaluation, a
    checkpoint or the end. A replica that comes to one posts its step in any case (`enter`), so that no replica waits
    for one that waits. The names of posts contain the number of sync points so far, which is the same on all replicas
    that can see each other's posts.

    The first rank of each replica uses the store, and broadcasts the outcome inside the replica.

    Args:
        context: the ranks.
        while_waiting: called again and again during a wait; raises where the wait is in vain.
        on_progress: called when a replica that this one waits for has gone on, so that nothing counts as stuck.
    """

    def __init__(
        self,
        context: ParallelContext,
        while_waiting: Callable[[], None] = lambda: None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._me, self._all = context.index("data"), range(context.size("data"))
        self._replica = context.group(context.replica_axes)
        self._is_leader = self._replica.index == 0
        self._store, self._device = context.store(), context.device
        self._timeout, self.while_waiting = context.timeout.total_seconds(), while_waiting
        self._on_progress = on_progress
        self._sync_points = self._rounds = 0
        #: the (step, requests) that all replicas have agreed on
        self._agreed: tuple[int, float] | None = None
        self._seen, self._next_look, self._has_posted = 0.0, 0.0, False
        self._num_steps = self._num_waits = 0

    # -- requests -----------------------------------------------------------------------------------------

    def pending_requests(self) -> float:
        """Return requests of other replicas, on the first rank of this one, which adds them to its own; else 0.

        Most calls do not look at the store and cost nothing.
        """
        if not self._is_leader:
            return 0.0
        now, self._num_steps = time.monotonic(), self._num_steps + 1
        if now >= self._next_look:
            self._next_look = now + _LOOK_EVERY
            self._store.set(f"progress/{self._me}", str(self._num_steps))
            self._look()
        return self._seen

    def _look(self) -> float:
        request = self._key("request")
        if not self._seen and self._store.check([request]):
            self._seen = float(self._store.get(request))
        return self._seen

    def answer(self, latest: int) -> None:
        """Post this replica's step where there is a request, in a wait inside a step: another replica may wait for it.

        Args:
            latest: the number of steps after which this replica can stop.
        """
        if self._is_leader and not self._has_posted and self._look():
            self._post(latest, self._seen)

    def agree(self, completed: int, requests: float) -> float:
        """Return the requests that all replicas act on after this step, 0 for none; on all ranks of a replica.

        Args:
            completed: the steps that this replica has completed, this one included.
            requests: the requests of this replica and `pending_requests`; the same on all of its ranks.

        Raises:
            RuntimeError: a replica was silent for too long.
        """
        if self._agreed is None and requests:
            if self._is_leader:
                if not self._has_posted:
                    self._post(completed, requests)
                self._store.set(self._key("request"), repr(requests))
            self._agreed = self._broadcast(self._largest_post() if self._is_leader else None)
        if self._agreed is None or completed < self._agreed[0]:
            return 0.0
        (step, total), self._agreed = self._agreed, None
        assert step == completed, f"all stop after step {step}, but this replica is at {completed}"
        self._rounds, self._seen, self._has_posted = self._rounds + 1, 0.0, False
        return total

    # -- sync points --------------------------------------------------------------------------------------

    def enter(self, completed: int) -> None:
        """Post that this replica comes to a sync point, and can stop after ``completed`` steps or later."""
        if self._is_leader:
            self._store.set(self._sync_point_key(self._me), f"{completed} 0.0")

    def leave(self, *, looks: bool = True) -> None:
        """Leave the sync point, to which all replicas have come. Collective in a replica.

        Args:
            looks: whether to look for a request on which others have agreed meanwhile, with this replica's post. False
                where the sync point itself spreads all requests.
        """
        if not looks:
            self._agreed = None
        elif self._agreed is None:
            # a replica makes its request before it comes to the sync point, and none uses this name afterwards
            is_requested = self._is_leader and self._store.check([self._key("request")])
            self._agreed = self._broadcast(self._largest_post() if is_requested else None)
        self._sync_points, self._rounds, self._seen, self._has_posted = self._sync_points + 1, 0, 0.0, False

    def wait_for_all(self) -> None:
        """Wait until all replicas have come here, however far behind they are, as long as one of them makes steps.

        Raises:
            PeerGone: none of them has made a step for the time that a collective may take.
        """
        self._num_waits += 1
        keys = {replica: f"arrived/{self._num_waits}/{replica}" for replica in self._all}
        self._store.set(keys[self._me], "")
        progress: list[bytes] = []
        since = time.monotonic()
        while missing := [replica for replica, key in keys.items() if not self._store.check([key])]:
            self.while_waiting()
            steps = [f"progress/{replica}" for replica in missing]
            before, progress = progress, [self._store.get(key) if self._store.check([key]) else b"" for key in steps]
            if progress != before:
                since = time.monotonic()
                self._on_progress()
            elif time.monotonic() - since > self._timeout:
                raise PeerGone(
                    f"timeout: this replica waits for replica {', '.join(map(str, missing))}, but none of these has "
                    f"made a step for {self._timeout:g} s (comm.timeout_seconds)"
                )
            time.sleep(_POLL[0])

    # -- the store ----------------------------------------------------------------------------------------

    def _key(self, name: object) -> str:
        return f"stop/{self._sync_points}/{self._rounds}/{name}"

    def _sync_point_key(self, replica: int) -> str:
        return f"sync_point/{self._sync_points}/{replica}"

    def _post(self, completed: int, requests: float) -> None:
        self._has_posted = True
        self._store.set(self._key(self._me), f"{completed} {requests!r}")

    def _largest_post(self) -> tuple[int, float]:
        """Wait until all replicas have posted, and return the largest step and the largest requests of their posts."""
        posts: dict[int, tuple[int, float]] = {}
        deadline, pause = time.monotonic() + self._timeout, _POLL[0]
        while True:
            for replica in self._all:
                if replica not in posts and (post := self._post_of(replica)) is not None:
                    posts[replica] = post
                    deadline = time.monotonic() + self._timeout
                    self._on_progress()
            missing = [str(replica) for replica in self._all if replica not in posts]
            if not missing:
                return max(step for step, _ in posts.values()), max(total for _, total in posts.values())
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the run is to stop, but replica {', '.join(missing)} has not come to the end of a step within "
                    f"{self._timeout:g} s (comm.timeout_seconds)"
                )
            self.while_waiting()
            time.sleep(pause)
            pause = min(2 * pause, _POLL[1])

    def _post_of(self, replica: int) -> tuple[int, float] | None:
        # a replica posts the step of a request first and its sync point later, so the checks are in the other order
        is_at_sync_point = self._store.check([self._sync_point_key(replica)])
        for key in (self._key(replica), *([self._sync_point_key(replica)] if is_at_sync_point else [])):
            if self._store.check([key]):
                step, total = self._store.get(key).split()
                return int(step), float(total)
        return None

    def _broadcast(self, agreed: tuple[int, float] | None) -> tuple[int, float] | None:
        """Return the first rank's value on all ranks of its replica."""
        numbers = torch.tensor(agreed or (-1, 0.0), dtype=torch.float64, device=self._device)
        step, total = collectives.broadcast(numbers, self._replica, 0).tolist()
        return None if step < 0 else (int(step), total)
