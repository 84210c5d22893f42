"""What a worker waits for: one operation at several servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from colossus.server.messages import Call, Refused, Reply, ServerGone

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")
_MOST_NAMES = 3


@dataclass
class ServerCall:
    """One operation at one server, and the tensors that it is of.

    Attributes:
        is_told: whether somebody who waited was told that it was refused.
    """

    server: int
    op: str
    names: Sequence[str]
    call: Call
    is_told: bool = False

    def wait(self, timeout: float | None = None) -> Reply:
        """As `Call.wait`; errors say of what."""
        try:
            return self.call.wait(timeout)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; it was to {_in_words(self.op, self.names)}") from error
        except Refused as error:
            raise Refused(f"server {self.server} refused to {_in_words(self.op, self.names)}: {error}") from error
        except ServerGone as error:
            raise gone_in(error, self.op, self.names) from error


class UnwaitedPushes:
    """Pushes that nobody may wait for: one that was refused is told of at the next call, or at the end."""

    def __init__(self) -> None:
        self._calls: list[ServerCall] = []
        self._lock = threading.Lock()

    def add(self, calls: Sequence[ServerCall]) -> None:
        with self._lock:
            self._calls += calls

    def require_accepted(self) -> None:
        """
        Raises:
            Refused: one that is done was refused, and nobody was told.
        """
        with self._lock:
            done = [each for each in self._calls if each.call.is_done()]
            self._calls = [each for each in self._calls if not each.call.is_done()]
        for each in done:
            if not each.is_told:
                with suppress(ServerGone):  # which every other call tells, too
                    each.wait(0.0)


def gone_in(error: ServerGone, op: str, names: Sequence[str]) -> ServerGone:
    """The same error, which says what was asked for."""
    reason = f"{error.reason}; it was to {_in_words(op, names)}"
    return ServerGone(error.index, error.address, reason, error.last_sign)


def _in_words(op: str, names: Sequence[str]) -> str:
    if not names:
        return op
    more = len(names) - _MOST_NAMES
    return f"{op} {', '.join(map(repr, names[:_MOST_NAMES]))}" + (f" and {more} more" if more > 0 else "")


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


class StartCall(Protocol):
    """Starts an operation at one server, of tensors by name."""

    def __call__(
        self,
        server: int,
        op: str,
        names: Sequence[str],
        header: Mapping[str, Any],
        arrays: Sequence[Tensor] = (),
        into: Sequence[Tensor] | None = None,
    ) -> ServerCall: ...


class Handle(Generic[T]):
    """An operation that is under way. It goes on whether it is waited for or not."""

    def __init__(self, calls: Sequence[ServerCall], finish: Callable[[list[Reply]], T]) -> None:
        self._calls, self._finish = calls, finish
        self._lock = threading.Lock()
        self._result: T
        self._is_finished = False

    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._is_finished or all(each.call.is_done() for each in self._calls)

    def then(self, use: Callable[[T], U]) -> Handle[U]:
        """What ``use`` makes of the result, when it is waited for."""
        return Handle(self._calls, lambda _: use(self.wait()))

    def and_then(self, start: Callable[[T], Handle[U]]) -> Handle[U]:
        """What ``start`` starts with the result, when this is waited for."""
        return _Chain(self, start)

    def wait(self, timeout: float | None = None) -> T:
        """The result, once all servers have answered. It may be asked for again, and from any thread.

        Args:
            timeout: seconds; None: as long as the servers live. `Servers.waiting_for` says whom they wait for.

        Raises:
            ServerGone: a server has ended.
            Refused: a server lives, and does not do this.
            TimeoutError: after ``timeout``; it is still under way.
        """
        left = _Left(timeout)
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError(f"another thread waits for the same, which was not done within {timeout:g} s")
        try:
            if not self._is_finished:
                self._result = self._finish([each.wait(left.seconds()) for each in self._calls])
                self._is_finished = True
        except Refused:
            for each in self._calls:  # those of other servers, too
                each.is_told = True
            raise
        finally:
            self._lock.release()
        return self._result


class _Left:
    """What is left of a time-out."""

    def __init__(self, timeout: float | None) -> None:
        self._end = None if timeout is None else time.monotonic() + timeout

    def seconds(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())


class _Chain(Handle[U]):
    """One operation after another."""

    def __init__(self, first: Handle[T], start: Callable[[T], Handle[U]]) -> None:
        self._first: Handle[Handle[U]] = first.then(start)

    def is_done(self) -> bool:
        return self._first.is_done() and self._first.wait().is_done()

    def then(self, use: Callable[[U], V]) -> Handle[V]:
        return _Chain(self._first, lambda second: second.then(use))

    def wait(self, timeout: float | None = None) -> U:
        left = _Left(timeout)
        return self._first.wait(left.seconds()).wait(left.seconds())
