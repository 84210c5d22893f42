"""Calls of workers at a server: many under way at once, replies in any order, each handed to the server exactly once.

A first version within one process: threads, no sockets.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from colossus.server.messages import Call, Refused, Reply, Request, ServerGone

__all__ = ["Call", "Refused", "Reply", "Request", "RpcClient", "RpcServer", "ServerGone"]

Endpoint = dict[str, Any]

_servers: dict[int, RpcServer] = {}
_numbers = itertools.count(1)


class RpcServer:
    """Hands the requests of workers to ``handle``.

    ``handle`` and ``on_gone`` are called by one thread of the server, one after the other; the requests of a worker
    come in the order of its calls. An exception in one of them is the end of the server: all workers are told. What
    is wrong with a single request is said by `Request.fail`.

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
        reconnect_seconds: within which a worker whose connection was cut must have made another.
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
        reconnect_seconds: float = 3.0,
        most_bytes: int | None = None,
    ) -> None:
        self._handle, self._token, self._on_gone, self._on_failure = handle, token, on_gone, on_failure
        number = next(_numbers)
        self.endpoint: Endpoint = {"index": index, "number": number, "process": os.getpid()}
        self._clients: list[RpcClient] = []
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="colossus-server", daemon=True)
        self._thread.start()
        _servers[number] = self

    def close(self) -> None:
        """End: workers that are connected see `ServerGone` (it was closed). Idempotent."""
        if _servers.pop(self.endpoint["number"], None) is not None:
            self._queue.put(None)
            self._thread.join()
            for client in self._clients:
                client._lose("it was closed")

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception as error:
                _servers.pop(self.endpoint["number"], None)
                self._on_failure(error)
                for client in self._clients:
                    client._lose(f"it has failed: {type(error).__name__}: {error}")
                return


class RpcClient:
    """The calls of one worker at one server. From any thread.

    Args:
        endpoint: `RpcServer.endpoint`.
        token: of the run.
        worker: number of this worker; one client of a number at a time.
        timeout_seconds: of silence after which the server is taken for dead.
        on_progress: called by a thread of the client whenever something of a call has moved.

    Raises:
        ServerGone: nothing answers at the endpoint.
        Refused: the server does not take this worker: a wrong token, or another client of its number is connected.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        token: bytes,
        worker: int,
        timeout_seconds: float = 60.0,
        on_progress: Callable[[], object] = lambda: None,
    ) -> None:
        self.index: int = endpoint["index"]
        self._worker, self._on_progress = worker, on_progress
        self._address = f"process {endpoint['process']}"
        self._calls: set[Call] = set()
        self._lost: str | None = None
        server = _servers.get(endpoint["number"])
        if server is None:
            raise ServerGone(self.index, self._address, "nothing listens there")
        if server._token != token:
            raise Refused(f"server {self.index} at {self._address} refused worker {worker}: it has another token")
        self._server = server
        server._clients.append(self)

    def call(
        self,
        op: str,
        header: dict[str, Any] | None = None,
        arrays: Sequence[Tensor] = (),
        into: Sequence[Tensor] | None = None,
    ) -> Call:
        """Start a call.

        Args:
            op: what is asked for.
            header: data of JSON.
            arrays: on the host; copied before this returns, so that they may be changed afterwards.
            into: where the arrays of the reply go, of the same number, shapes and dtypes: written to by a thread of the
                client at any time until the call is done. None: new tensors.

        Raises:
            ServerGone: it is gone already.
            ValueError: what cannot be sent.
        """
        if self._lost is not None:
            raise ServerGone(self.index, self._address, self._lost)
        call = Call(op, f"server {self.index} at {self._address}")
        self._calls.add(call)
        copies = [array.detach().clone().contiguous() for array in arrays]

        def answer(header: dict[str, Any] | None, arrays: Sequence[Tensor], error: str | None) -> None:
            self._calls.discard(call)
            if error is not None:
                call.finish(None, Refused(error))
                return
            out = [array.detach().clone() for array in arrays]
            if into is not None:
                for target, source in zip(into, out, strict=True):
                    with torch.no_grad():
                        target.copy_(source)
                out = list(into)
            self._on_progress()
            call.finish(Reply(json.loads(json.dumps(header)), out), None)

        request = Request(self._worker, op, json.loads(json.dumps(header or {})), copies, answer)
        self._server._queue.put(lambda: self._server._handle(request))
        return call

    def close(self) -> None:
        """Say goodbye, after all calls under way are done. Idempotent."""
        if self in self._server._clients:
            self._server._clients.remove(self)
            self._server._queue.put(lambda: self._server._on_gone(self._worker, None))

    def _lose(self, reason: str) -> None:
        self._lost = reason
        for call in tuple(self._calls):
            call.finish(None, ServerGone(self.index, self._address, reason))
