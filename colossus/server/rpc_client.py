"""The end of a worker: calls at a server, many under way at once, with replies in any order.

A request is applied at most once: a connection is never made again, and when it is lost all calls of its client end
with `ServerGone`.
"""

from __future__ import annotations

import concurrent.futures
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from colossus.comm.host_staging import BufferPool
from colossus.comm.listener import dial
from colossus.comm.net import WireError
from colossus.server.frames import Messages, Refused, Reply, ServerGone, copy, send

T = TypeVar("T")
U = TypeVar("U")

#: what a client says of itself: the number of its worker
WORKER = struct.Struct("<i")
#: bytes of tensors under way; then the next call waits
_MOST_CALL_BYTES = 256 << 20
#: memory that is kept for later
_POOLED_BYTES = 256 << 20
#: in which what is left must be written at the end
_CLOSE_SECONDS = 2.0


@dataclass(eq=False)
class _Pending:
    future: Future[Reply]
    op: str
    into: Sequence[Tensor] | None
    num_bytes: int = 0


class RpcClient:
    """The calls of one worker at one server. From any thread.

    Args:
        endpoint: `RpcServer.endpoint`.
        token: of the run.
        worker: number of this worker, an int32; one client of a number at a time.
        timeout_seconds: of silence after which the server is taken for dead, at least
            `colossus.server.process.LEAST_TIMEOUT_SECONDS`.
        on_progress: called by a thread of the client whenever a reply has come.

    Raises:
        ServerGone: nothing answers at the endpoint.
        Refused: the server does not take this worker: a wrong token, or another client of its number is connected.
    """

    def __init__(
        self,
        endpoint: dict[str, Any],
        token: bytes,
        worker: int,
        timeout_seconds: float = 60.0,
        on_progress: Callable[[], object] = lambda: None,
    ) -> None:
        self.index: int = endpoint["index"]
        host, port = endpoint["host"], endpoint["port"]
        self.address = f"{f'[{host}]' if ':' in host else host}:{port} (process {endpoint['process']})"
        self._on_progress = on_progress
        self._buffers = BufferPool(_POOLED_BYTES)
        self._changed = threading.Condition(threading.RLock())
        self._pending: dict[int, _Pending] = {}
        self._last = self._num_bytes = 0
        #: why there are no calls any more
        self._gone: str | None = None
        self._is_closed = False
        self._welcome: Future[str | None] = Future()
        refused = f"server {self.index} at {self.address} refused worker {worker}"
        try:
            self._stream = dial((host, port), token, WORKER.pack(worker), timeout_seconds)
        except WireError as error:
            raise Refused(f"{refused}: the token of this process is of another run ({error})") from error
        except OSError as error:
            reason = "nothing listens there" if isinstance(error, ConnectionRefusedError) else str(error)
            raise ServerGone(self.index, self.address, reason) from error
        self._stream.start(Messages(self._buffers, self._into_of, self._take, self._end), timeout_seconds)
        refusal = self._welcome.result()
        if self._gone is not None:
            raise self._error()
        if refusal is not None:
            self._stream.abort()
            raise Refused(f"{refused}: {refusal}")

    def _error(self) -> ServerGone:
        return ServerGone(self.index, self.address, self._gone or "it was closed")

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
            header: data of JSON.
            arrays: on the host; copied before this returns, so that they may be changed afterwards.
            into: where the arrays of the reply go, of the same number, shapes and dtypes: written to by a thread of the
                client at any time until the call is done. None: new tensors.

        Raises:
            ServerGone: it is gone already.
        """
        pending = _Pending(Future(), op, into)
        pending.future.set_running_or_notify_cancel()  # it cannot be cancelled
        with self._changed:
            self._changed.wait_for(lambda: self._gone is not None or self._num_bytes < _MOST_CALL_BYTES)
            if self._gone is not None:
                raise self._error()
            if self._is_closed:
                raise RuntimeError(f"a call {op!r} at server {self.index} by a client that was closed")
            self._last += 1
            self._pending[self._last] = pending
            head = {"n": self._last, "o": op, "h": header or {}}
            pending.num_bytes = send(self._stream, head, arrays, self._buffers)
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
            self._end(head["failed"])
            return
        with self._changed:
            pending = self._pending.pop(head["n"])
            self._num_bytes -= pending.num_bytes
            self._changed.notify_all()
        if "e" in head:
            pending.future.set_exception(Refused(f"server {self.index} refused to {pending.op}: {head['e']}"))
        else:
            if pending.into is not None and buffer is not None:  # they are not contiguous
                for target, source in zip(pending.into, arrays, strict=True):
                    copy(target, source)
                self._buffers.give_back(buffer)
            pending.future.set_result(Reply(head["h"], arrays if pending.into is None else list(pending.into)))
        self._on_progress()

    def _end(self, reason: str | None) -> None:
        with self._changed:
            if self._gone is None:
                self._gone = reason or "it was closed"
            lost = list(self._pending.values())
            self._pending.clear()
            self._num_bytes = 0
            self._changed.notify_all()
        for pending in lost:
            pending.future.set_exception(self._error())
        if not self._welcome.done():
            self._welcome.set_result(None)


class Handle(Generic[T]):
    """One operation at several servers, under way. It goes on whether it is waited for or not; what is to be made of
    the replies is made by who waits.
    """

    def __init__(self, calls: Sequence[Future[Reply]], finish: Callable[[list[Reply]], T]) -> None:
        self._calls, self._finish = calls, finish
        self._lock = threading.Lock()
        self._result: T
        self._is_finished = False

    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return all(call.done() for call in self._calls)

    def then(self, use: Callable[[T], U]) -> Handle[U]:
        """What ``use`` makes of the result, when it is waited for."""
        return Handle(self._calls, lambda _: use(self.wait()))

    def wait(self, timeout: float | None = None) -> T:
        """The result, once all servers have answered. It may be asked for again, and from any thread.

        Args:
            timeout: seconds; None: as long as the servers live. `Servers.waiting_for` says whom they wait for.

        Raises:
            ServerGone: a server has ended.
            Refused: a server lives, and does not do this.
            TimeoutError: after ``timeout``; it is still under way.
        """
        if concurrent.futures.wait(self._calls, timeout).not_done:
            raise TimeoutError(f"the servers live, but have not answered within {timeout:g} s")
        with self._lock:
            if not self._is_finished:
                self._result = self._finish([call.result() for call in self._calls])
                self._is_finished = True
        return self._result
