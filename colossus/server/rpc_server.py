"""The end of a server: requests of workers, handed over one after the other; and the process of a server.

``python -m colossus.server.rpc_server STATUS`` is started by `ServerProcess`. It reads what it is from the first line
of its input (so that the token is in no list of processes), says where it is through the descriptor STATUS, and ends
when its input says so or is closed, when its parent has gone, or by SIGTERM.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import queue
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from colossus import machine
from colossus.comm.host_staging import BufferPool
from colossus.comm.listener import Listener
from colossus.comm.net import Stream, WireError
from colossus.server.frames import Messages, Request, send
from colossus.server.rpc_client import WORKER
from colossus.server.store import ShardStore

_log = logging.getLogger("colossus.server")
#: memory that is kept for later
_POOLED_BYTES = 1 << 30
#: in which what is left must be written at the end
_CLOSE_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 0.5


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
        on_failure: called by the server's thread after an exception has ended it.
        timeout_seconds: of silence after which a worker is given up.
        most_bytes: of the arrays of one request; None: a quarter of the memory of the machine.

    Attributes:
        endpoint: where it is: data of JSON, for `RpcClient`.
        ended: why it has ended, in words; None while it serves.
    """

    def __init__(
        self,
        handle: Callable[[Request], object],
        token: bytes,
        *,
        index: int = 0,
        host: str | None = None,
        on_gone: Callable[[int, str | None], object] = lambda worker, reason: None,
        on_failure: Callable[[], object] = lambda: None,
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
        self.ended: str | None = None
        self._is_closing = False
        host = machine.own_address() if host is None else host
        self._listener = Listener(host, token, self._take_in, f"server {index}")
        port = self._listener.address[1]
        self.endpoint: dict[str, Any] = {"index": index, "host": host, "port": port, "process": os.getpid()}
        self._handler = threading.Thread(target=self._run, name="colossus-server-handler", daemon=True)
        self._handler.start()

    def close(self) -> None:
        """End, when the request at work is done: workers that are connected see `ServerGone` (it was closed).
        Idempotent; not from the handler."""
        self._is_closing = True
        self._work.put(None)
        self._handler.join()
        self._listener.close()
        if self.ended is None:
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
                self._tell_end(f"it has failed: {type(error).__name__}: {error}")
                self._on_failure()
                return
            del work  # and with it what it holds

    def _tell_end(self, why: str) -> None:
        self.ended = why
        for stream in tuple(self._streams.values()):
            send(stream, {"failed": why}, (), self._buffers)

    # -- by the thread of the streams -------------------------------------------------------------------------

    def _take_in(self, stream: Stream) -> None:
        (worker,) = WORKER.unpack(stream.about)

        def take(head: dict[str, Any], arrays: list[Tensor], buffer: Tensor | None) -> None:
            self._take_request(worker, stream, head, arrays, buffer)

        def leave(reason: str | None) -> None:
            if self._streams.get(worker) is stream:
                del self._streams[worker]
                self._work.put(lambda: self._on_gone(worker, reason))

        is_new = self._streams.setdefault(worker, stream) is stream
        stream.start(Messages(self._buffers, self._most_bytes, lambda head: None, take, leave), self._timeout)
        if self.ended is not None:
            send(stream, {"failed": self.ended}, (), self._buffers)
        else:
            refusal = None if is_new else f"a client of worker {worker} is connected already"
            send(stream, {"welcome": refusal}, (), self._buffers)

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


# -- the process ----------------------------------------------------------------------------------------------


class _Terminated(BaseException):
    pass


def _terminate(*_: object) -> None:
    raise _Terminated


def main() -> int:
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)  # the run ends in order, which is its parent's to see to
    status = os.fdopen(int(sys.argv[1]), "w")
    told: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    if told["bind"] and sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, _terminate)
    with contextlib.suppress(OSError, ValueError):  # each connection is a file
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logging.basicConfig(format=f"server {told['index']}: %(message)s")
    torch.set_num_threads(1)
    store, (wake_read, wake_write) = ShardStore(), os.pipe()
    try:
        server = RpcServer(
            store.handle,
            bytes.fromhex(told["token"]),
            index=told["index"],
            host=told["host"],
            on_gone=store.on_gone,
            on_failure=lambda: os.write(wake_write, b"f"),
            timeout_seconds=told["timeout_seconds"],
        )
    except Exception as error:
        print(json.dumps({"failure": f"{type(error).__name__}: {error}"}), file=status, flush=True)
        raise
    print(json.dumps({"endpoint": server.endpoint}), file=status, flush=True)
    try:
        while server.ended is None and os.getppid() == told["parent"]:
            ready, _, _ = select.select([sys.stdin, wake_read], [], [], _LOOK_SECONDS)
            if sys.stdin in ready:  # it says close, or is closed
                break
        failed = server.ended is not None
        server.close()
        return int(failed)
    except _Terminated:
        server.close()
        return 128 + signal.SIGTERM


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of torch need no farewell
