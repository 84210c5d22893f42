"""Calls of workers at servers: their requests and replies, and the errors of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from colossus.comm.peer_gone import PeerGone


class ServerGone(PeerGone):
    """A server has ended, has failed, or is silent.

    Attributes:
        index: index of the server.
    """

    def __init__(self, index: int, address: str, reason: str) -> None:
        super().__init__(f"server {index} at {address} is gone: {reason}", index)


class Refused(RuntimeError):
    """A living server has refused this call. The message is that of `Request.fail`."""


@dataclass(frozen=True)
class Reply:
    """The answer of a server.

    Attributes:
        header: header that the handler has sent.
        arrays: the tensors of ``into``, if the call had some; else new ones, which the caller owns.
    """

    header: dict[str, Any]
    arrays: list[Tensor]


@dataclass(eq=False)
class Request:
    """A worker's request at a server's handler. It is answered once, at once or later.

    Attributes:
        worker: number of the worker.
        op: name of the operation.
        header: JSON data.
        arrays: contiguous tensors on the host, read-only, valid until the answer; a handler that keeps one clones it.
    """

    worker: int
    op: str
    header: dict[str, Any]
    arrays: list[Tensor]
    _answer: Callable[[dict[str, Any], Sequence[Tensor]], None] = field(repr=False)

    def reply(self, header: dict[str, Any] | None = None, arrays: Sequence[Tensor] = ()) -> None:
        """Answer the request. The arrays are copied before this returns. A worker that is gone receives nothing."""
        self._answer({"h": header or {}}, arrays)
        self.arrays = []

    def fail(self, error: Exception) -> None:
        """Refuse the request: the worker's call raises `Refused` with the message of this error."""
        self._answer({"e": str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"}, ())
        self.arrays = []
