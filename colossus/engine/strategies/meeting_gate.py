"""Replicas that need nobody between meetings: those that live come to one, however many have died since the last."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from colossus.context.death_board import OPEN
from colossus.context.parallel_context import ParallelContext
from colossus.engine.strategies.death_news import DeathNews

#: between two looks who has come
_LOOK_SECONDS = 0.01
#: for which a replica that is said to be dead waits for its launcher to end it
_END_SECONDS = 45.0


class MeetingGate:
    """All that live wait here for each other, before what they do together in collectives.

    A death changes nothing for the others until they meet. There those that died since the last meeting are left out,
    all at once; nobody begins what others do not. From the opened gate to the end of what they do together a death ends
    the run: collectives are under way.

    Args:
        on_progress: called where others that are waited for go on: nothing is stuck.

    Attributes:
        replicas: that live, as far as is settled.
        completed: steps of this replica, to be kept up to date.
    """

    def __init__(self, context: ParallelContext, on_progress: Callable[[], None] = lambda: None) -> None:
        self._context, self._on_progress = context, on_progress
        self.replicas = tuple(range(context.size("data")))
        self.completed = 0
        self._news = DeathNews(context, completed=lambda: self.completed)
        self._dead: list[int] = []
        self._num_heard = self._num_settled = self._num_meetings = 0

    def begin(self) -> None:
        """This replica trains: from its first step on others can go on without it."""
        self._news.begin()

    def dead(self) -> Collection[int]:
        """The replicas of which it is known that they have died, settled or not."""
        num_deaths = self._news.num_deaths
        while self._num_heard < num_deaths:
            self._num_heard += 1
            self._dead += self._news.board.death(self._num_heard).replicas
        return self._dead

    def meet(self) -> None:
        """Wait until all that live have come, as long as those make steps that have not. Collective over all ranks.

        Raises:
            RuntimeError: none of these has made one for the time that a collective may take.
        """
        self._num_meetings += 1
        attempt = 0
        while (decision := self._come(f"{self._num_meetings}.{attempt}")) != OPEN:
            self._settle(int(decision))
            attempt += 1

    def _come(self, meeting: str) -> str:
        board, most = self._news.board, self._context.timeout.total_seconds()
        progress, since = None, time.monotonic()

        def wait() -> None:
            nonlocal progress, since
            absent = [replica for replica in self.replicas if not board.have_arrived(meeting, [replica])]
            now, found = time.monotonic(), [(replica, board.completed(replica)) for replica in absent]
            if found != progress:
                progress, since = found, now
                self._on_progress()
            elif now - since > most:
                raise RuntimeError(
                    f"timeout: this replica waits after {self.completed} steps for replica "
                    f"{', '.join(map(str, absent))}, of which none has completed a step for {most:g} s "
                    f"(comm.timeout_seconds)"
                )
            time.sleep(_LOOK_SECONDS)

        return self._news.decide(meeting, self.replicas, self._num_settled, wait)

    def _settle(self, num_deaths: int) -> None:
        """Go on without those of the first ``num_deaths`` deaths."""
        board = self._news.board
        deaths = [board.death(number) for number in range(self._num_settled + 1, num_deaths + 1)]
        dead = [replica for death in deaths for replica in death.replicas]
        if self._context.index("data") in dead:  # the launcher is about to end this process
            time.sleep(_END_SECONDS)
        self.replicas = tuple(replica for replica in self.replicas if replica not in dead)
        self._news.leave_out(dead)
        for death in deaths:
            if self._context.is_logging_rank:
                completed = [board.completed(replica) or 0 for replica in death.replicas]
                board.tell(death.number, {"step": max(completed) + 1})
            board.settle(death.number)
        self._num_settled = num_deaths

    def close(self) -> None:
        self._news.close()
