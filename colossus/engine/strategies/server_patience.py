"""For how long a rank waits for what servers answer only when other workers have done their part."""

from __future__ import annotations

import time
from typing import TypeVar

from colossus.server.client import Servers
from colossus.server.handles import Handle

T = TypeVar("T")

#: looks for whom the servers wait, within the time-out
_LOOKS = 4


class Patience:
    """
    Args:
        seconds: for which the same workers may be waited for.
    """

    def __init__(self, servers: Servers, seconds: float) -> None:
        self._servers, self._seconds = servers, seconds

    def wait(self, handle: Handle[T]) -> T:
        """The result. It is waited for as long as others come, or the servers themselves are at work.

        Raises:
            RuntimeError: the same workers did not come for all of the time; it names them.
            ServerGone, Refused: as `Handle.wait` has it.
        """
        found, since = None, time.monotonic()
        while True:
            try:
                return handle.wait(self._seconds / _LOOKS)
            except TimeoutError as error:
                late = error
            waits = self._servers.waiting_for().wait()
            now = time.monotonic()
            if not waits or (found is not None and waits != found):
                since = now
            elif now - since >= self._seconds:
                ranks = sorted({worker for each in waits for worker in each.workers})
                raise RuntimeError(
                    f"timeout: rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} did not come to the servers "
                    f"within {self._seconds:g} s (comm.timeout_seconds): {'; '.join(map(str, waits))}"
                ) from late
            found = waits or None
