"""How replicas that do not wait for each other stop after the same step: through the store."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from colossus.comm import collectives
from colossus.comm.peer_gone import PeerGone
from colossus.context.parallel_context import ParallelContext

#: seconds between two looks at the store
_LOOK_EVERY = 0.2
#: seconds between two looks of a replica that waits
_POLL = (0.005, 0.1)


class StopAgreement:
    """A request of any rank to stop becomes a step after which all replicas stop: the largest that any has completed.

    A replica that requests it posts that and the steps it has completed, and waits until all others have posted theirs,
    which they do when they see the request; all see the same steps then, and nobody is beyond the largest of them.

    A *sync point* is where all replicas wait for each other: in a collective of theirs, at an evaluation, a checkpoint
    or the end. Who comes to one posts where it is, requested or not (`enter`), so that nobody waits for one that waits.
    Posts are named by the number of sync points so far, the same on all replicas that can see each other's.

    The first rank of each replica writes to the store, and tells the others of its replica what they have to know.

    Args:
        while_waiting: called again and again; raises when it is in vain.
        on_progress: called where one that is waited for has gone on: nothing is stuck.
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
        #: (step, requests) that all have agreed on
        self._agreed: tuple[int, float] | None = None
        self._seen, self._next_look, self._has_posted = 0.0, 0.0, False
        self._num_steps = self._meetings = 0

    # -- requests -----------------------------------------------------------------------------------------

    def heard(self) -> float:
        """A request of another replica, for the leader to add to what its replica sums; costs nothing on most calls."""
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
        """This replica waits for others in the midst of a step, and one of them may wait for its post: after ``latest``
        steps it can stop, having heard of the request.
        """
        if self._is_leader and not self._has_posted and self._look():
            self._post(latest, self._seen)

    def agree(self, completed: int, requests: float) -> float:
        """At the end of a step, on all ranks of a replica: the requests that all replicas act on now, 0 for none.

        Args:
            completed: steps that this replica has completed, this one included.
            requests: of this replica, what was `heard` included; the same on all its ranks.

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
        assert step == completed, f"all stop after step {step}, and this replica is at {completed}"
        self._rounds, self._seen, self._has_posted = self._rounds + 1, 0.0, False
        return total

    # -- sync points --------------------------------------------------------------------------------------

    def enter(self, completed: int) -> None:
        """This replica comes to a sync point, and can stop after ``completed`` steps, or later."""
        if self._is_leader:
            self._store.set(self._sync_point_key(self._me), f"{completed} 0.0")

    def leave(self, *, looks: bool = True) -> None:
        """All replicas have come to the sync point. Collective in a replica.

        Args:
            looks: whether a request is looked for that others have agreed on meanwhile, and counted on this replica
                as one that waits. Not where the sync point itself tells all replicas of all requests.
        """
        if not looks:
            self._agreed = None
        elif self._agreed is None:
            # whoever requested it before this sync point came to it after that; nobody uses this name after it
            is_requested = self._is_leader and self._store.check([self._key("request")])
            self._agreed = self._broadcast(self._largest_post() if is_requested else None)
        self._sync_points, self._rounds, self._seen, self._has_posted = self._sync_points + 1, 0, 0.0, False

    def meet(self) -> None:
        """Wait until all replicas have come here, however far behind they are, as long as one of them makes steps.

        Raises:
            RuntimeError: none has made one for the time that a collective may take.
        """
        self._meetings += 1
        keys = {replica: f"arrived/{self._meetings}/{replica}" for replica in self._all}
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
                    f"timeout: this replica waits for replica {', '.join(map(str, missing))}, of which none has made a "
                    f"step for {self._timeout:g} s (comm.timeout_seconds)"
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
        """Wait until all replicas have posted."""
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
        # a replica posts the step of a request before it comes to the sync point: who sees the latter sees the former
        meets = self._store.check([self._sync_point_key(replica)])
        for key in (self._key(replica), *([self._sync_point_key(replica)] if meets else [])):
            if self._store.check([key]):
                step, total = self._store.get(key).split()
                return int(step), float(total)
        return None

    def _broadcast(self, agreed: tuple[int, float] | None) -> tuple[int, float] | None:
        """What the leader says, on all ranks of its replica."""
        numbers = torch.tensor(agreed or (-1, 0.0), dtype=torch.float64, device=self._device)
        step, total = collectives.broadcast(numbers, self._replica, 0).tolist()
        return None if step < 0 else (int(step), total)
