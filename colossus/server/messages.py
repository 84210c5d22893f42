"""What workers and servers say to each other: requests, replies, and how a call ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


class ServerGone(RuntimeError):
    """A server has ended, has failed, or gives no sign of life.

    Attributes:
        index: of the server.
        address: at which it was reached.
        reason: in words, without index and address.
        last_sign: `time.monotonic` when something last came from it; None when nothing ever did.
    """

    def __init__(self, index: int, address: str, reason: str, last_sign: float | None = None) -> None:
        self.index, self.address, self.reason, self.last_sign = index, address, reason, last_sign
        seen = "nothing ever came from it"
        if last_sign is not None:
            seen = f"the last sign of life came {max(0.0, time.monotonic() - last_sign):.1f} s ago"
        super().__init__(f"server {index} at {address} is gone: {reason} ({seen})")


class Refused(RuntimeError):
    """The server lives, and has refused this call: its handler has said why by `Request.fail`."""


@dataclass(frozen=True)
class Reply:
    """What a server has answered.

    Attributes:
        header: as the handler gave it.
        arrays: where the call was given ``into``, those tensors; else new ones, the caller's own.
    """

    header: dict[str, Any]
    arrays: list[Tensor]


@dataclass(eq=False)
class Request:
    """What a worker asks for, as the handler of a server gets it. It is answered once, at once or later, from any
    thread.

    Attributes:
        worker: its number.
        op: what is asked for.
        header: data of JSON.
        arrays: on the host, contiguous; only to be read, and valid until the answer. Who keeps one longer clones it.
    """

    worker: int
    op: str
    header: dict[str, Any]
    arrays: list[Tensor]
    _answer: Callable[[dict[str, Any], Sequence[Tensor]], None] = field(repr=False)
    _is_answered: bool = field(default=False, repr=False)

    def reply(self, header: dict[str, Any] | None = None, arrays: Sequence[Tensor] = ()) -> None:
        """Answer. The arrays are copied before this returns, so that they may be changed afterwards.

        A worker that is gone is answered in silence.
        """
        self._once({"h": header or {}}, arrays)

    def fail(self, message: str) -> None:
        """Refuse the request: the result of the worker's call is `Refused`, with this message."""
        self._once({"e": message}, ())

    def _once(self, head: dict[str, Any], arrays: Sequence[Tensor]) -> None:
        if self._is_answered:
            raise RuntimeError(f"the request {self.op!r} of worker {self.worker} was answered already")
        self._is_answered = True
        self._answer(head, arrays)
        self.arrays = []
