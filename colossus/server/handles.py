"""What a worker waits for: one operation at several servers."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from colossus.server.messages import Reply

T = TypeVar("T")
U = TypeVar("U")


class Handle(Generic[T]):
    """An operation that is under way. It goes on whether it is waited for or not; what is to be made of the replies is
    made by who waits.

    Attributes:
        was_waited_for: whether somebody was told how it ended.
    """

    def __init__(self, calls: Sequence[Future[Reply]], finish: Callable[[list[Reply]], T]) -> None:
        self._calls, self._finish = calls, finish
        self._lock = threading.Lock()
        self._result: T
        self._is_finished = self.was_waited_for = False

    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return all(call.done() for call in self._calls)

    def then(self, use: Callable[[T], U]) -> Handle[U]:
        """What ``use`` makes of the result, when it is waited for."""
        return Handle(self._calls, lambda _: use(self.wait()))

    def wait(self, timeout: float | None = None) -> T:
        """The result, once all servers have answered. It may be asked for again, and from any thread.

        Args:
            timeout: seconds; None: as long as the servers live. `Servers.waiting_for` says whom they wait for.

        Raises:
            ServerGone: a server has ended.
            Refused: a server lives, and does not do this.
            TimeoutError: after ``timeout``; it is still under way.
        """
        if concurrent.futures.wait(self._calls, timeout).not_done:
            raise TimeoutError(f"the servers live, but have not answered within {timeout:g} s")
        self.was_waited_for = True
        with self._lock:
            if not self._is_finished:
                self._result = self._finish([call.result() for call in self._calls])
                self._is_finished = True
        return self._result


@dataclass(frozen=True)
class Waits:
    """Why a call of this worker is not answered yet.

    Attributes:
        workers: those that a server waits for.
        words: what they have not done.
    """

    server: int
    workers: tuple[int, ...]
    words: str

    def __str__(self) -> str:
        found = ", ".join(map(str, self.workers))
        return (
            f"server {self.server} waits for {'workers' if len(self.workers) > 1 else 'worker'} {found}: {self.words}"
        )


#: looks for whom the servers wait, within the time-out
_LOOKS = 4


def wait_or_name_missing(handle: Handle[T], waiting_for: Callable[[], Handle[list[Waits]]], seconds: float) -> T:
    """The result of what depends on other workers, waited for as long as others come, or the servers are at work.

    Args:
        waiting_for: `Servers.waiting_for`.
        seconds: for which the same workers may be waited for.

    Raises:
        RuntimeError: the same workers did not come for all of the time; it names them.
        ServerGone, Refused: as `Handle.wait` has it.
    """
    found, since = None, time.monotonic()
    while True:
        try:
            return handle.wait(seconds / _LOOKS)
        except TimeoutError as error:
            late = error
        waits = waiting_for().wait()
        now = time.monotonic()
        if not waits or (found is not None and waits != found):
            since = now
        elif now - since >= seconds:
            ranks = sorted({worker for each in waits for worker in each.workers})
            raise RuntimeError(
                f"timeout: rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} did not come to the servers "
                f"within {seconds:g} s (comm.timeout_seconds): {'; '.join(map(str, waits))}"
            ) from late
        found = waits or None
