"""Requests that are answered later, when something that others do has come about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from colossus.server.messages import Request

#: whether a request can be answered now: None, not yet; else what answers it
Answer = Callable[[], object]
#: what a request waits for: workers, and in words
Awaited = tuple[list[int], str]


@dataclass(frozen=True)
class _Deferred:
    request: Request
    look: Callable[[], Answer | None]
    awaited: Callable[[], Awaited]


class WaitingRequests:
    """Requests that wait. ``look`` of each says whether it can be answered now, and a ValueError of it refuses the
    request."""

    def __init__(self) -> None:
        self._deferred: list[_Deferred] = []

    def __len__(self) -> int:
        return len(self._deferred)

    def of(self, worker: int) -> list[Awaited]:
        """What each request of a worker waits for."""
        return [deferred.awaited() for deferred in self._deferred if deferred.request.worker == worker]

    def add(self, request: Request, look: Callable[[], Answer | None], awaited: Callable[[], Awaited]) -> None:
        """Answer a request, at once where it can be.

        Args:
            awaited: what it waits for while it is not answered.
        """
        deferred = _Deferred(request, look, awaited)
        if not self._try(deferred):
            self._deferred.append(deferred)

    def look_again(self) -> None:
        """Something has changed. What an answer changes is looked at, too."""
        before = -1
        while len(self._deferred) != before:
            before = len(self._deferred)
            for deferred in tuple(self._deferred):
                if self._try(deferred):
                    self._deferred.remove(deferred)

    @staticmethod
    def _try(deferred: _Deferred) -> bool:
        try:
            answer = deferred.look()
        except ValueError as error:
            deferred.request.fail(str(error))
            return True
        except Exception as error:
            deferred.request.fail(f"{deferred.request.op}: {type(error).__name__}: {error}")
            return True
        if answer is not None:
            answer()
        return answer is not None
