"""The client of a worker: calls at a server, many under way at once, with replies in any order.

A request is applied at most once: a lost connection is not made again, and all calls of its client raise `ServerGone`.
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
from colossus.comm.messages import Messages, copy, send
from colossus.comm.net import WireError
from colossus.comm.step_regions import in_region
from colossus.server.calls import Refused, Reply, ServerGone

T = TypeVar("T")
U = TypeVar("U")

#: greeting of a client: the number of its worker
WORKER = struct.Struct("<i")
#: bytes of tensors under way, above which the next call waits
_MOST_CALL_BYTES = 256 << 20
#: size of the pool of buffers
_POOLED_BYTES = 256 << 20
#: longest time to write the last messages when a connection is closed
_CLOSE_SECONDS = 2.0


@dataclass(eq=False)
class _Pending:
    future: Future[Reply]
    op: str
    into: Sequence[Tensor] | None
    num_bytes: int = 0


class RpcClient:
    """The calls of one worker at one server. Thread-safe.

    Args:
        endpoint: `RpcServer.endpoint`.
        token: key of the run.
        worker: number of this worker, an int32; only one client of a number is connected at a time.
        timeout_seconds: silence after which the server counts as dead, at least
            `colossus.server.process.LEAST_TIMEOUT_SECONDS`.
        on_progress: called by a thread of the client after each reply.

    Raises:
        ServerGone: if nothing answers at the endpoint.
        Refused: if the token is wrong, or another client of this number is connected.
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
        #: why no call can be made any more
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
        self._stream.start(Messages(self._buffers, self._take, self._end, self._into_of), timeout_seconds)
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
        """Start a call. Waits while too many bytes are under way.

        The result is `ServerGone` if the server has ended or is silent, `Refused` if its handler has refused the
        request. A living server may delay an answer without limit, for example by a bound on staleness.

        Args:
            op: name of the operation.
            header: JSON data.
            arrays: tensors on the host; they are copied before this returns.
            into: tensors that receive the arrays of the reply, of the same number, shapes and dtypes. A thread of the
                client writes to them until the call is done. None: new tensors.

        Raises:
            ServerGone: if it is gone already.
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
        """Wait for the calls under way while the server lives, and close the connection. Idempotent.

        Args:
            patience_seconds: longest wait; None: forever.
        """
        with self._changed:
            if not self._is_closed:
                self._changed.wait_for(lambda: not self._pending, patience_seconds)
            self._is_closed = True
        self._stream.close(_CLOSE_SECONDS)
        self._end("the client was closed")

    # -- called by the thread of the stream ------------------------------------------------------------------

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
            if pending.into is not None and buffer is not None:  # the tensors of ``into`` are not contiguous
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
    """One operation at several servers, under way.

    It proceeds whether or not anybody waits for it. The thread that waits builds the result from the replies.
    """

    def __init__(self, calls: Sequence[Future[Reply]], finish: Callable[[list[Reply]], T]) -> None:
        self._calls, self._finish = calls, finish
        self._lock = threading.Lock()
        self._result: T
        self._is_finished = False

    def is_done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return all(call.done() for call in self._calls)

    def then(self, use: Callable[[T], U]) -> Handle[U]:
        """Return a handle whose result is ``use`` of this result, computed when it is waited for."""
        return Handle(self._calls, lambda _: use(self.wait()))

    @in_region("wait for the servers", "over servers")
    def wait(self, timeout: float | None = None) -> T:
        """Return the result once all servers have answered. May be called again, and from any thread.

        Args:
            timeout: seconds; None: as long as the servers live. `Servers.waiting_for` names the workers that they wait
                for.

        Raises:
            ServerGone: if a server has ended.
            Refused: if a living server has refused the call.
            TimeoutError: after ``timeout``; the operation is still under way.
        """
        if concurrent.futures.wait(self._calls, timeout).not_done:
            raise TimeoutError(f"the servers live, but have not answered within {timeout:g} s")
        with self._lock:
            if not self._is_finished:
                self._result = self._finish([call.result() for call in self._calls])
                self._is_finished = True
        return self._result
