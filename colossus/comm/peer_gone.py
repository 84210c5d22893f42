"""The error of a rank that waits for another one in vain. No torch."""

from __future__ import annotations


class PeerGone(RuntimeError):
    """Another process has died or is silent, so that this rank cannot go on: it is a victim, the cause is elsewhere.

    Attributes:
        index: of the other in the group, where one is known.
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index
