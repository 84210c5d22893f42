"""The end of a server: requests of workers, handed over one after the other; and the process of a server.

`ServerProcess` starts that with the word STATUS. It reads what it is from the first line
of its input (so that the token is in no list of processes), says where it is through the descriptor STATUS, and ends
when its input says so or is closed, or when its parent has gone.
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
from colossus.comm.net import Stream
from colossus.server.frames import Messages, Request, send
from colossus.server.rpc_client import WORKER
from colossus.server.store import ShardStore

_log = logging.getLogger("colossus.server")
#: memory that is kept for later
_POOLED_BYTES = 1 << 30
#: in which what is left must be written at the end
_CLOSE_SECONDS = 2.0
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
        timeout_seconds: of silence after which a worker is given up.

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
        timeout_seconds: float = 60.0,
    ) -> None:
        self._handle, self._on_gone, self._timeout = handle, on_gone, timeout_seconds
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

    def close(self, patience_seconds: float = 0.0) -> None:
        """End: workers that are connected after the patience see `ServerGone` (it was closed), when the request at work
        is done. Idempotent; not from the handler.
        """
        deadline = time.monotonic() + patience_seconds
        while self._streams and self.ended is None and time.monotonic() < deadline:
            time.sleep(0.005)
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
                return
            del work  # and with it what it holds

    def _tell_end(self, why: str) -> None:
        self.ended = why
        for stream in tuple(self._streams.values()):
            send(stream, {"failed": why}, (), self._buffers)

    # -- by the thread of the streams -------------------------------------------------------------------------

    def _take_in(self, stream: Stream) -> None:
        (worker,) = WORKER.unpack(stream.about)
        is_new = self._streams.setdefault(worker, stream) is stream

        def take(head: dict[str, Any], arrays: list[Tensor], buffer: Tensor | None) -> None:
            def answer(told: dict[str, Any], arrays: Sequence[Tensor]) -> None:
                send(stream, {"n": head["n"], **told}, arrays, self._buffers)
                if buffer is not None:
                    self._buffers.give_back(buffer)

            request = Request(worker, head["o"], head["h"], arrays, answer)
            self._work.put(lambda: self._handle(request))

        def leave(reason: str | None) -> None:
            if is_new:
                del self._streams[worker]
                self._work.put(lambda: self._on_gone(worker, reason))

        stream.start(Messages(self._buffers, lambda head: None, take, leave), self._timeout)
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
    os._exit(code)  # threads of torch need no farewell


def _serve(descriptor: int) -> int:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)  # the run ends in order, which is its parent's to see to
    status = os.fdopen(descriptor, "w")
    given: dict[str, Any] = json.loads(sys.stdin.readline())
    machine.raise_open_files()
    logging.basicConfig(format=f"server {given['index']}: %(message)s")
    torch.set_num_threads(1)
    store = ShardStore()
    try:
        server = RpcServer(
            store.handle,
            bytes.fromhex(given["token"]),
            index=given["index"],
            host=given["host"],
            on_gone=store.on_gone,
            timeout_seconds=given["timeout_seconds"],
        )
    except Exception as error:
        print(json.dumps({"failure": f"{type(error).__name__}: {error}"}), file=status, flush=True)
        raise
    print(json.dumps({"endpoint": server.endpoint}), file=status, flush=True)
    last: list[Any] = []
    while server.ended is None and os.getppid() == given["parent"] and not last:
        last, _, _ = select.select([sys.stdin], [], [], _LOOK_SECONDS)
    failed = server.ended is not None
    server.close(float(sys.stdin.readline() or 0) if last else 0.0)  # for so long it waits for workers
    return int(failed)
