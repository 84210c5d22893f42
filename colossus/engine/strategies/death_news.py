"""What a replica hears of others that died, and the gate through which all that live go before they meet."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from colossus.comm import ring, shared_memory
from colossus.context.death_board import DEATH_STORE, OPEN, connect
from colossus.context.parallel_context import ParallelContext

#: between two looks whether the launcher has posted a death
_LOOK_SECONDS = 0.1
#: for which the launcher's store may not answer
_DEAF_SECONDS = 5.0


def is_posted() -> bool:
    """Whether a launcher goes on without replicas that die, and posts their deaths."""
    return DEATH_STORE in os.environ


class DeathNews:
    """The launcher's board of deaths, and a thread that looks for new ones, on a connection of its own.

    Args:
        on_news: called by the thread after each new death.
        completed: steps that this replica has completed, which the thread posts; None posts nothing.

    Attributes:
        board: for this thread.
        num_deaths: what the thread has seen.
    """

    def __init__(
        self,
        context: ParallelContext,
        on_news: Callable[[], object] = lambda: None,
        completed: Callable[[], int] | None = None,
    ) -> None:
        address = os.environ.get(DEATH_STORE)
        if address is None:
            raise ValueError(
                "parallel.strategy.on_death = 'continue' needs `colossus launch`, whose launcher goes on when a rank "
                "has died: torchrun and srun end all ranks, and processes that you start yourself nobody looks after"
            )
        if context.device.type != "cpu":
            raise ValueError(
                "parallel.strategy.on_death = 'continue' is for ranks on CPU: NCCL's groups do not outlive the death "
                "of a member; use on_death='stop', or device='cpu'"
            )
        self.board = connect(address, context.timeout)
        self.num_deaths = 0
        self._context, self._on_news, self._completed = context, on_news, completed
        self._inside = context.group(context.replica_axes)
        self._has_begun = False
        #: since when the thread has seen nothing, and why
        self._deaf: tuple[float, RuntimeError] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(address,), name="colossus-deaths", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """This replica trains: from its first step on others can go on without it."""
        if not self._has_begun:
            self._has_begun = True
            self.board.begin()

    def decide(
        self,
        meeting: str,
        replicas: Sequence[int],
        num_settled: int,
        wait: Callable[[], object],
    ) -> str:
        """Come to a gate: `OPEN`, or the number of deaths that are to be settled first: the same for all.

        Args:
            meeting: its name, the same for all.
            replicas: that live, as far as is settled.
            num_settled: deaths that are.
            wait: called again and again; raises when it is in vain.
        """
        board, is_first = self.board, self._inside.index == 0
        if is_first:
            board.arrive(meeting, self._context.index("data"))
        while (decision := board.decision(meeting)) is None:
            if is_first:
                num_deaths = self.num_deaths
                if num_deaths > num_settled:
                    board.decide(meeting, str(num_deaths))
                elif board.have_arrived(meeting, replicas):
                    board.decide(meeting, OPEN)
                    continue
            self.require_hearing()
            wait()
        return decision

    def leave_out(self, replicas: Sequence[int]) -> None:
        """Collectives go on without these. Collective over all that live."""
        context = self._context
        dead = {rank for rank in context.ranks if context.grid.index(rank, "data") in replicas}
        for group in context.leave_out(dead):
            shared_memory.forget(group)
            ring.forget(group)

    def require_hearing(self) -> None:
        """
        Raises:
            RuntimeError: when no news of deaths could be heard for a while.
        """
        deaf = self._deaf
        if deaf is not None and time.monotonic() - deaf[0] > _DEAF_SECONDS:
            raise RuntimeError(
                f"the launcher's store, through which replicas hear of deaths, has not answered for {_DEAF_SECONDS:g} "
                f"s: {deaf[1]}"
            ) from deaf[1]

    def close(self) -> None:
        self._closing.set()
        self._thread.join(2 * _LOOK_SECONDS + 1.0)

    def _watch(self, address: str) -> None:
        """Look for news, on another connection where one breaks."""
        board, posted = None, -1
        while not self._closing.wait(_LOOK_SECONDS):
            try:
                board = board or connect(address, self._context.timeout)
                completed = self._completed() if self._completed is not None and self._inside.index == 0 else -1
                if completed != posted:
                    board.post_completed(self._context.index("data"), completed)
                    posted = completed
                num_deaths = board.num_deaths()
            except RuntimeError as error:
                board = None
                self._deaf = self._deaf or (time.monotonic(), error)
                continue
            self._deaf = None
            if num_deaths != self.num_deaths:
                self.num_deaths = num_deaths
                self._on_news()
