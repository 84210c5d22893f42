"""The end of a worker: calls at a server, many under way at once, with replies in any order.

A request is applied at most once: a connection is never made again, and when it is lost all calls of its client end
with `ServerGone`.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from colossus import machine
from colossus.comm.buffer_pool import BufferPool
from colossus.comm.net import BEAT_SECONDS, Stream, WireError, dial
from colossus.server.arrays import copy, pack
from colossus.server.environment import LEAST_TIMEOUT_SECONDS, wrong_endpoint
from colossus.server.frames import Messages, send
from colossus.server.messages import Refused, Reply, ServerGone

#: what a client says of itself: the number of its worker
WORKER = struct.Struct("<i")
#: calls under way, and bytes of their tensors; then the next one waits
_MOST_CALLS = 256
_MOST_CALL_BYTES = 256 << 20
#: tensors that an error lists
_MOST_NAMES = 3
#: memory that is kept for later
_POOLED_BYTES = 256 << 20
#: for which it is tried where another client of this number is connected
_BUSY_SECONDS = 2.0
#: in which what is left must be written at the end
_CLOSE_SECONDS = 2.0


@dataclass(eq=False)
class _Pending:
    future: Future[Reply]
    what: str
    into: Sequence[Tensor] | None
    num_bytes: int = 0


class RpcClient:
    """The calls of one worker at one server. From any thread.

    Args:
        endpoint: `RpcServer.endpoint`.
        token: of the run.
        worker: number of this worker, an int32; one client of a number at a time.
        timeout_seconds: of silence after which the server is taken for dead, at least `LEAST_TIMEOUT_SECONDS`.
        on_progress: called by a thread of the client whenever a reply has come.

    Raises:
        ServerGone: nothing answers at the endpoint.
        Refused: the server does not take this worker: a wrong token, or another client of its number is connected.
        ValueError: the endpoint is none.
    """

    def __init__(
        self,
        endpoint: dict[str, Any],
        token: bytes,
        worker: int,
        timeout_seconds: float = 60.0,
        on_progress: Callable[[], object] = lambda: None,
    ) -> None:
        if (wrong := wrong_endpoint(endpoint)) is not None:
            raise ValueError(f"the endpoint of a server: {wrong}")
        if timeout_seconds < LEAST_TIMEOUT_SECONDS:
            raise ValueError(
                f"timeout_seconds = {timeout_seconds:g}: a sign of life comes each {BEAT_SECONDS:g} s, so that a "
                f"server can be taken for dead after {LEAST_TIMEOUT_SECONDS:g} s at the earliest"
            )
        self.index: int = endpoint["index"]
        host = endpoint["host"]
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{endpoint['port']} (process {endpoint['process']})"
        self._worker, self._timeout, self._on_progress = worker, timeout_seconds, on_progress
        self._buffers = BufferPool(_POOLED_BYTES)
        self._changed = threading.Condition(threading.RLock())
        self._pending: dict[int, _Pending] = {}
        self._last = self._num_bytes = 0
        self._gone: ServerGone | None = None
        self._is_closed = False
        self._stream = self._enter((host, endpoint["port"]), token)

    def _enter(self, address: tuple[str, int], token: bytes) -> Stream:
        began = time.monotonic()
        most_bytes = machine.memory_bytes()[0] // 4
        while True:
            self._welcome: Future[str | None] = Future()
            try:
                stream = dial(address, token, WORKER.pack(self._worker), self._timeout)
            except WireError as error:
                raise self._refused(
                    f"it does not take the token of this process, which is of another run ({error})"
                ) from error
            except OSError as error:
                reason = "nothing listens there" if isinstance(error, ConnectionRefusedError) else str(error)
                raise ServerGone(self.index, self.address, reason) from error
            self._stream = stream
            stream.start(Messages(self._buffers, most_bytes, self._into_of, self._take, self._end), self._timeout)
            refusal = self._welcome.result()
            if self._gone is not None:
                raise self._gone
            if refusal is None:
                return stream
            stream.abort()
            if time.monotonic() - began > _BUSY_SECONDS:
                raise self._refused(refusal)
            time.sleep(0.05)

    def _refused(self, why: str) -> Refused:
        return Refused(f"server {self.index} at {self.address} refused worker {self._worker}: {why}")

    def call(
        self,
        op: str,
        header: dict[str, Any] | None = None,
        arrays: Sequence[Tensor] = (),
        into: Sequence[Tensor] | None = None,
    ) -> Future[Reply]:
        """Start a call. Waits while too much is under way.

        The result is `ServerGone` when the server has ended or is silent, `Refused` when its handler has refused the
        request. A server that lives but has not answered is waited for without end: it may have reasons, as a bound on
        staleness is one.

        Args:
            op: what is asked for.
            header: data of JSON; its ``names`` are told in errors.
            arrays: on the host; copied before this returns, so that they may be changed afterwards.
            into: where the arrays of the reply go, of the same number, shapes and dtypes: written to by a thread of the
                client at any time until the call is done. None: new tensors.

        Raises:
            ServerGone: it is gone already.
            ValueError: what cannot be sent.
        """
        header = header or {}
        pending = _Pending(Future(), _in_words(op, header.get("names", ())), into)
        pending.future.set_running_or_notify_cancel()  # it cannot be cancelled
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._gone is not None or (len(self._pending) < _MOST_CALLS and self._num_bytes < _MOST_CALL_BYTES)
                )
            )
            if self._gone is not None:
                raise self._error_of(self._gone, pending.what)
            if self._is_closed:
                raise RuntimeError(f"a call {op!r} at server {self.index} by a client that was closed")
            self._last += 1
            self._pending[self._last] = pending
            try:
                pending.num_bytes = send(self._stream, {"n": self._last, "o": op, "h": header}, arrays, self._buffers)
            except BaseException:
                del self._pending[self._last]
                raise
            self._num_bytes += pending.num_bytes
        return pending.future

    def close(self, patience_seconds: float | None = None) -> None:
        """Wait for the calls under way, as long as the server lives, and say goodbye. Idempotent.

        Args:
            patience_seconds: for which calls are waited for; None: without end.
        """
        with self._changed:
            if not self._is_closed:
                self._changed.wait_for(lambda: not self._pending, patience_seconds)
            self._is_closed = True
        self._stream.close(_CLOSE_SECONDS)
        self._end("the client was closed")

    # -- by the thread of the stream --------------------------------------------------------------------------

    def _into_of(self, head: dict[str, Any]) -> Sequence[Tensor] | None:
        pending = self._pending.get(head.get("n", 0))
        return None if pending is None else pending.into

    def _take(self, head: dict[str, Any], arrays: list[Tensor], buffer: Tensor | None) -> None:
        if "welcome" in head:
            self._welcome.set_result(head["welcome"])
            return
        if "failed" in head:
            self._end(str(head["failed"]))
            return
        with self._changed:
            pending = self._pending.pop(head.get("n", 0), None)
            if pending is None:
                raise WireError("a reply to nothing")
            self._num_bytes -= pending.num_bytes
            self._changed.notify_all()
        if "e" in head:
            pending.future.set_exception(Refused(f"server {self.index} refused to {pending.what}: {head['e']}"))
        elif pending.into is None:
            pending.future.set_result(Reply(head.get("h") or {}, arrays))
        elif (found := pack(arrays)).fits(pending.into):
            if buffer is not None:  # it could not be read to where it belongs, which is not contiguous
                for target, source in zip(pending.into, arrays, strict=True):
                    copy(target, source)
                self._buffers.give_back(buffer)
            pending.future.set_result(Reply(head.get("h") or {}, list(pending.into)))
        else:
            wanted = pack(pending.into).describe()
            pending.future.set_exception(
                ValueError(f"the reply has arrays {found.describe()}, where into has {wanted}")
            )
        self._on_progress()

    def _end(self, reason: str | None) -> None:
        gone = ServerGone(self.index, self.address, reason or "it was closed", self._stream.last_heard)
        with self._changed:
            if self._gone is None:
                self._gone = gone
            lost = list(self._pending.values())
            self._pending.clear()
            self._num_bytes = 0
            self._changed.notify_all()
        for pending in lost:
            pending.future.set_exception(self._error_of(self._gone, pending.what))
        if not self._welcome.done():
            self._welcome.set_result(None)

    @staticmethod
    def _error_of(gone: ServerGone, what: str) -> ServerGone:
        """The same, which says what was asked for."""
        return ServerGone(gone.index, gone.address, f"{gone.reason}; it was to {what}", gone.last_sign)


def _in_words(op: str, names: Sequence[str]) -> str:
    if not names:
        return op
    more = len(names) - _MOST_NAMES
    return f"{op} {', '.join(map(repr, names[:_MOST_NAMES]))}" + (f" and {more} more" if more > 0 else "")
