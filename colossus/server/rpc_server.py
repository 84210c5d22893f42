"""The end of a server: requests of workers, handed over one after the other."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from colossus import machine
from colossus.comm.buffer_pool import BufferPool
from colossus.comm.net import Listener, Stream, WireError
from colossus.server.frames import Messages, send
from colossus.server.messages import Request
from colossus.server.rpc_client import WORKER

_log = logging.getLogger("colossus.server")
#: memory that is kept for later
_POOLED_BYTES = 1 << 30
#: in which what is left must be written at the end
_CLOSE_SECONDS = 2.0


class RpcServer:
    """Hands the requests of workers to ``handle``.

    ``handle`` and ``on_gone`` are called by one thread of the server, one after the other; the requests of a worker
    come in the order of its calls, each once. An exception in one of them is the end of the server: all workers are
    told. What is wrong with a single request is said by `Request.fail`.

    Args:
        handle: is given each request once, and answers it at once or later.
        token: known to the processes of the run alone.
        index: of this server, from 0.
        host: address to listen at for other hosts; None: that of the interface in GLOO_SOCKET_IFNAME, else that from
            which MASTER_ADDR is reached, else the loopback.
        on_gone: ``on_gone(worker, reason)``: a worker's client has been closed (reason None), or the worker has died
            or is silent. Its requests that have no answer yet may be answered all the same.
        on_failure: told of the exception that ends the server, from its thread.
        timeout_seconds: of silence after which a worker is given up.
        most_bytes: of the arrays of one request; None: a quarter of the memory of the machine.

    Attributes:
        endpoint: where it is: data of JSON, for `RpcClient`.
    """

    def __init__(
        self,
        handle: Callable[[Request], object],
        token: bytes,
        *,
        index: int = 0,
        host: str | None = None,
        on_gone: Callable[[int, str | None], object] = lambda worker, reason: None,
        on_failure: Callable[[BaseException], object] = lambda error: None,
        timeout_seconds: float = 60.0,
        most_bytes: int | None = None,
    ) -> None:
        self._handle, self._on_gone, self._on_failure = handle, on_gone, on_failure
        self._timeout = timeout_seconds
        self._most_bytes = machine.memory_bytes()[0] // 4 if most_bytes is None else most_bytes
        self._buffers = BufferPool(_POOLED_BYTES)
        #: by worker
        self._streams: dict[int, Stream] = {}
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        #: why it has ended, in words
        self._ended: str | None = None
        self._is_closing = False
        host = machine.own_address() if host is None else host
        self._listener = Listener(host, token, self._take_in, f"server {index}")
        self.endpoint: dict[str, Any] = {
            "index": index,
            "host": host,
            "port": self._listener.address[1],
            "process": os.getpid(),
        }
        self._handler = threading.Thread(target=self._run, name="colossus-server-handler", daemon=True)
        self._handler.start()

    def close(self) -> None:
        """End, when the request at work is done: workers that are connected see `ServerGone` (it was closed).
        Idempotent; not from the handler."""
        self._is_closing = True
        self._work.put(None)
        self._handler.join()
        self._listener.close()
        if self._ended is None:
            self._tell_end("it was closed")
        deadline = time.monotonic() + _CLOSE_SECONDS
        for stream in tuple(self._streams.values()):
            stream.close(max(0.0, deadline - time.monotonic()))
            stream.abort()

    def _run(self) -> None:
        while (work := self._work.get()) is not None and not self._is_closing:
            try:
                work()
            except Exception as error:
                _log.exception("server %d has failed", self.endpoint["index"])
                self._on_failure(error)
                self._tell_end(f"it has failed: {type(error).__name__}: {error}")
                return
            del work  # and with it what it holds

    def _tell_end(self, why: str) -> None:
        self._ended = why
        for stream in tuple(self._streams.values()):
            send(stream, {"failed": why}, (), self._buffers)

    # -- by the thread of the streams -------------------------------------------------------------------------

    def _take_in(self, stream: Stream) -> None:
        (worker,) = WORKER.unpack(stream.about)

        def take(head: dict[str, Any], arrays: list[Tensor], buffer: Tensor | None) -> None:
            self._take_request(worker, stream, head, arrays, buffer)

        is_new = worker not in self._streams
        if is_new:
            self._streams[worker] = stream
        messages = Messages(
            self._buffers, self._most_bytes, lambda head: None, take, lambda reason: self._leave(worker, stream, reason)
        )
        stream.start(messages, self._timeout)
        if self._ended is not None:
            send(stream, {"failed": self._ended}, (), self._buffers)
        else:
            refusal = None if is_new else f"a client of worker {worker} is connected already"
            send(stream, {"welcome": refusal}, (), self._buffers)

    def _leave(self, worker: int, stream: Stream, reason: str | None) -> None:
        if self._streams.get(worker) is stream:
            del self._streams[worker]
            self._work.put(lambda: self._on_gone(worker, reason))

    def _take_request(
        self, worker: int, stream: Stream, head: dict[str, Any], arrays: list[Tensor], buffer: Tensor | None
    ) -> None:
        number, op, header = head.get("n"), head.get("o"), head.get("h")
        if type(number) is not int or type(op) is not str or type(header) is not dict:
            raise WireError("a request without an operation")
        if self._streams.get(worker) is not stream:
            raise WireError(f"a request of a client that was refused, worker {worker}")

        def answer(told: dict[str, Any], arrays: Sequence[Tensor]) -> None:
            send(stream, {"n": number, **told}, arrays, self._buffers)
            if buffer is not None:
                self._buffers.give_back(buffer)

        request = Request(worker, op, header, arrays, answer)
        self._work.put(lambda: self._handle(request))
