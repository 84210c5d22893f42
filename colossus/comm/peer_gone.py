"""The error of a rank that waits in vain for another one. No torch."""

from __future__ import annotations


class PeerGone(RuntimeError):
    """Another process has died or is silent, so this rank cannot go on. The cause lies with the other process.

    Attributes:
        index: the other rank's index in the group, or None where that is unknown.
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index
