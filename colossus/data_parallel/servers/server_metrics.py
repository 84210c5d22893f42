"""What metrics say of servers: bytes, seconds waited, staleness."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from colossus.rows.row_gradient import RowGradient


class ServerReport:
    """Of one rank, since the last report."""

    def __init__(self) -> None:
        self._pushed = self._pulled = 0
        self._seconds = 0.0
        #: of the pushes, the staleness of the stalest tensor in each
        self._stale: list[int] = []

    def pushed(self, values: Iterable[Tensor | RowGradient | None]) -> None:
        for value in values:
            if isinstance(value, RowGradient):
                self._pushed += value.ids.nbytes + value.rows.nbytes
            elif value is not None:
                self._pushed += value.nbytes

    def pulled(self, num_bytes: int) -> None:
        self._pulled += num_bytes

    def waited(self, seconds: float) -> None:
        self._seconds += seconds

    def staleness(self, of_tensors: Iterable[int | None]) -> None:
        """Of one push: updates of each tensor between the pull and the push."""
        most = max((stale for stale in of_tensors if stale is not None), default=None)
        if most is not None:
            self._stale.append(most)

    def take(self) -> dict[str, float]:
        """By the names of metrics."""
        found = {
            "push_bytes": float(self._pushed),
            "pull_bytes": float(self._pulled),
            "server_wait_seconds": self._seconds,
        }
        if self._stale:
            found |= {"staleness": sum(self._stale) / len(self._stale), "staleness_max": float(max(self._stale))}
        self.__init__()  # type: ignore[misc]
        return found
