"""What a server has done: requests, bytes, time, updates, staleness. No torch."""

from __future__ import annotations

from collections import Counter
from typing import Any


class ServerLoad:
    """Counters of one server.

    Attributes:
        requests: by what was asked for.
        bytes_in, bytes_out: of tensors in requests and replies.
        busy_seconds: within requests.
        staleness: how many updates of its shard were applied between a worker's pull and its push -> how often.
    """

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.bytes_in = self.bytes_out = 0
        self.busy_seconds = 0.0
        self.staleness: Counter[int] = Counter()

    def as_json(self) -> dict[str, Any]:
        return {
            "requests": dict(self.requests),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "busy_seconds": self.busy_seconds,
            "staleness": sorted(self.staleness.items()),
        }
