"""The server: requests of workers, handled one after the other; and its process.

`ServerProcess` starts the process with a file descriptor as argument. The process reads its settings from the first
line of its input, so that the token is in no list of processes. It writes its endpoint to the descriptor. It ends when
its input says so or is closed, or when its parent is gone.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from colossus import machine
from colossus.comm.host_staging import BufferPool
from colossus.comm.listener import Listener
from colossus.comm.messages import Messages, send
from colossus.comm.net import Stream
from colossus.server.calls import Request
from colossus.server.rpc_client import WORKER
from colossus.server.store import ShardStore

_log = logging.getLogger("colossus.server")
#: size of the pool of buffers
_POOLED_BYTES = 1 << 30
#: longest time to write the last messages when connections are closed
_CLOSE_SECONDS = 2.0
#: seconds between two checks of the parent
_POLL_SECONDS = 0.5


class RpcServer:
    """A server that calls ``handle`` with the requests of workers.

    One thread of the server calls ``handle`` and ``on_gone``, one after the other. The requests of a worker come in the
    order of its calls, each once. An exception in one of the two ends the server, and all workers receive it. An error
    of a single request is reported by `Request.fail`.

    Args:
        handle: receives each request once, and answers it at once or later.
        token: key that only the processes of the run know.
        index: index of this server, from 0.
        host: address to listen at for other hosts; None: that of the interface in GLOO_SOCKET_IFNAME, else that from
            which MASTER_ADDR is reached, else the loopback.
        on_gone: ``on_gone(worker, reason)``: a worker's client was closed (reason None), or the worker has died or is
            silent. Its unanswered requests may still be answered.
        timeout_seconds: silence after which a worker counts as gone.

    Attributes:
        endpoint: JSON data with which `RpcClient` connects.
        ended: why the server has ended; None while it runs.
    """

    def __init__(
        self,
        handle: Callable[[Request], object],
        token: bytes,
        *,
        index: int = 0,
        host: str | None = None,
        on_gone: Callable[[int, str | None], object] = lambda worker, reason: None,
        timeout_seconds: float = 60.0,
    ) -> None:
        self._handle, self._on_gone, self._timeout = handle, on_gone, timeout_seconds
        self._buffers = BufferPool(_POOLED_BYTES)
        #: connections by worker
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

    def close(self, patience_seconds: float = 0.0) -> None:
        """End the server after the request at work. Idempotent; not from the handler.

        Workers that are connected still see `ServerGone` (it was closed).

        Args:
            patience_seconds: longest wait until all workers have left.
        """
        deadline = time.monotonic() + patience_seconds
        while self._streams and self.ended is None and time.monotonic() < deadline:
            time.sleep(0.005)
        self._is_closing = True
        self._work.put(None)
        self._handler.join()
        self._listener.close()
        if self.ended is None:
            self._announce_end("it was closed")
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
                self._announce_end(f"it has failed: {type(error).__name__}: {error}")
                return
            del work  # it references the arrays of the request

    def _announce_end(self, why: str) -> None:
        self.ended = why
        for stream in tuple(self._streams.values()):
            send(stream, {"failed": why}, (), self._buffers)

    # -- called by the thread of the streams -----------------------------------------------------------------

    def _take_in(self, stream: Stream) -> None:
        (worker,) = WORKER.unpack(stream.about)
        is_new = self._streams.setdefault(worker, stream) is stream

        def take(head: dict[str, Any], arrays: list[Tensor], buffer: Tensor | None) -> None:
            def answer(reply: dict[str, Any], arrays: Sequence[Tensor]) -> None:
                send(stream, {"n": head["n"], **reply}, arrays, self._buffers)
                if buffer is not None:
                    self._buffers.give_back(buffer)

            request = Request(worker, head["o"], head["h"], arrays, answer)
            self._work.put(lambda: self._handle(request))

        def leave(reason: str | None) -> None:
            if is_new:
                del self._streams[worker]
                self._work.put(lambda: self._on_gone(worker, reason))

        stream.start(Messages(self._buffers, take, leave), self._timeout)
        if self.ended is not None:
            send(stream, {"failed": self.ended}, (), self._buffers)
        else:
            refusal = None if is_new else f"a client of worker {worker} is connected already"
            send(stream, {"welcome": refusal}, (), self._buffers)


# -- the process ----------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> NoReturn:
    code = _serve(int(arguments[0]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # does not wait for threads of torch


def _serve(descriptor: int) -> int:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)  # its parent ends the server in order
    status = os.fdopen(descriptor, "w")
    settings: dict[str, Any] = json.loads(sys.stdin.readline())
    machine.raise_open_files()
    logging.basicConfig(format=f"server {settings['index']}: %(message)s")
    torch.set_num_threads(1)
    store = ShardStore()
    try:
        server = RpcServer(
            store.handle,
            bytes.fromhex(settings["token"]),
            index=settings["index"],
            host=settings["host"],
            on_gone=store.on_gone,
            timeout_seconds=settings["timeout_seconds"],
        )
    except Exception as error:
        print(json.dumps({"failure": f"{type(error).__name__}: {error}"}), file=status, flush=True)
        raise
    print(json.dumps({"endpoint": server.endpoint}), file=status, flush=True)
    last: list[Any] = []
    while server.ended is None and os.getppid() == settings["parent"] and not last:
        last, _, _ = select.select([sys.stdin], [], [], _POLL_SECONDS)
    failed = server.ended is not None
    server.close(float(sys.stdin.readline() or 0) if last else 0.0)  # its input has the patience in seconds
    return int(failed)
