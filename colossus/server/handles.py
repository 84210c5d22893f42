"""What a worker waits for: one operation at several servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from colossus.server.messages import Call, Refused, Reply, ServerGone

T = TypeVar("T")
U = TypeVar("U")
_MOST_NAMES = 3


@dataclass(frozen=True)
class ServerCall:
    """One operation at one server, and the tensors that it is of."""

    server: int
    op: str
    names: Sequence[str]
    call: Call

    def wait(self) -> Reply:
        """As `Call.wait`; errors say of what."""
        try:
            return self.call.wait()
        except Refused as error:
            raise Refused(f"server {self.server} refused to {_in_words(self.op, self.names)}: {error}") from error
        except ServerGone as error:
            raise gone_in(error, self.op, self.names) from error


def gone_in(error: ServerGone, op: str, names: Sequence[str]) -> ServerGone:
    """The same error, which says what was asked for."""
    reason = f"{error.reason}; it was to {_in_words(op, names)}"
    return ServerGone(error.index, error.address, reason, error.last_sign)


def _in_words(op: str, names: Sequence[str]) -> str:
    if not names:
        return op
    more = len(names) - _MOST_NAMES
    return f"{op} {', '.join(map(repr, names[:_MOST_NAMES]))}" + (f" and {more} more" if more > 0 else "")


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

    def wait(self) -> T:
        """The result, once all servers have answered. It may be asked for again, and from any thread.

        Raises:
            ServerGone: a server has ended.
            Refused: a server lives, and does not do this.
        """
        with self._lock:
            if not self._is_finished:
                self._result = self._finish([each.wait() for each in self._calls])
                self._is_finished = True
        return self._result
