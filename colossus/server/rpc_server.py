"""The end of a server: one thread reads and writes all connections, one runs the handler."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from colossus import machine
from colossus.comm.forked import close_in_children, keep
from colossus.comm.peer_wire import WireError
from colossus.comm.wake import Wake
from colossus.server import wire
from colossus.server.beats import BEAT_SECONDS
from colossus.server.connection import Connection
from colossus.server.entrance import Entrance
from colossus.server.intake import Intake
from colossus.server.messages import Request
from colossus.server.session import Session
from colossus.server.wire import BUSY, NEVER, WELCOME, Hello, Welcome

_log = logging.getLogger("colossus.server")
_LOOK_SECONDS = 0.2
#: within which those connected are told of the end
_CLOSE_SECONDS = 2.0
_MOST_GIVEN_UP = 1024


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
        self._timeout, self._reconnect = timeout_seconds, reconnect_seconds
        self._most_bytes = machine.memory_bytes()[0] // 4 if most_bytes is None else most_bytes
        #: by worker
        self._sessions: dict[int, Session] = {}
        #: why clients were given up, by incarnation
        self._given_up: dict[bytes, str] = {}
        self._intake = Intake(self._most_bytes, lambda request: self._work.put(lambda: self._handle(request)))
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        #: why it has ended, in words
        self._end: str | None = None
        self._is_closing = False
        self._selector = selectors.DefaultSelector()
        self._wake = Wake()
        self._selector.register(self._wake, selectors.EVENT_READ, self._wake.drain)
        host = machine.own_address() if host is None else host
        self._entrance = Entrance(self._selector, host, token, self._admit, f"server {index}")
        self.endpoint: dict[str, Any] = {
            "index": index,
            "host": host,
            "port": self._entrance.port,
            "unix": self._entrance.unix,
            "host_id": machine.host_id(),
            "process": os.getpid(),
        }
        self._entrance.open()
        self._handler = threading.Thread(target=self._run_handler, name="colossus-server-handler", daemon=True)
        self._reader = threading.Thread(target=self._run_reader, name="colossus-server", daemon=True)
        self._handler.start()
        self._reader.start()
        close_in_children(self)

    def close(self) -> None:
        """End, when the request at work is done: workers that are connected see `ServerGone` (it was closed).
        Idempotent; not from the handler."""
        self._is_closing = True
        self._work.put(None)
        self._handler.join()
        self._end = self._end or "it was closed"
        self._wake.call()
        self._reader.join()
        self._wake.close()
        keep(self)

    # -- the thread of the handler ---------------------------------------------------------------------------

    def _run_handler(self) -> None:
        while (work := self._work.get()) is not None and not self._is_closing:
            try:
                work()
            except Exception as error:
                _log.exception("server %d has failed", self.endpoint["index"])
                self._fail(error)
                return
            del work  # and with it what it holds

    def _fail(self, error: BaseException) -> None:
        self._on_failure(error)
        self._end = f"it has failed: {type(error).__name__}: {error}"
        self._wake.call()

    # -- the thread that reads -------------------------------------------------------------------------------

    def _run_reader(self) -> None:
        looked = 0.0
        told = False
        try:
            while self._end is None or not self._is_closing:
                self._watch_backlogs()
                for key, _ in self._selector.select(_LOOK_SECONDS):
                    key.data()
                if self._end is not None and not told:
                    told = True
                    self._tell_end()
                if time.monotonic() - looked > _LOOK_SECONDS:
                    looked = time.monotonic()
                    self._look_around()
            self._entrance.close()
            if not told:
                self._tell_end()
            deadline = time.monotonic() + _CLOSE_SECONDS
            while any(one.has_backlog for one in self._connections()) and time.monotonic() < deadline:
                self._watch_backlogs()
                for key, _ in self._selector.select(_LOOK_SECONDS):
                    key.data()
        except Exception as error:
            _log.exception("the connections of server %d have failed", self.endpoint["index"])
            self._fail(error)
        finally:
            self._entrance.close()
            for session in tuple(self._sessions.values()):
                if session.connection is not None:
                    session.connection.close()
                session.end()
            self._selector.close()
            self._wake.close_reading()

    def _connections(self) -> list[Connection]:
        return [one.connection for one in tuple(self._sessions.values()) if one.connection is not None]

    def _watch_backlogs(self) -> None:
        for connection in self._connections():
            connection.watch(self._selector)

    def _look_around(self) -> None:
        self._entrance.look_around()
        now = time.monotonic()
        for session in tuple(self._sessions.values()):
            connection = session.connection
            if connection is None:
                if now - session.lost_at > self._reconnect:
                    self._give_up(session, f"its connection was lost, and not made again in {self._reconnect:g} s")
            elif now - connection.last_heard > self._timeout:
                self._give_up(session, f"it gave no sign of life for {self._timeout:g} s")
            else:
                connection.beat(BEAT_SECONDS)

    def _tell_end(self) -> None:
        for connection in self._connections():
            connection.send(wire.frame(wire.FAILED, wire.encode(self._end)))

    def _admit(self, stream: socket.socket, hello: Hello) -> None:
        session = self._sessions.get(hello.worker)
        same = session is not None and session.incarnation == hello.incarnation
        status, words = WELCOME, ""
        if self._end is not None:
            status, words = NEVER, self._end
        elif not same and not hello.is_new:
            why = self._given_up.get(hello.incarnation, "it does not know it")
            status, words = NEVER, f"it has given up worker {hello.worker}: {why}"
        elif not same and session is not None and session.connection is not None:
            status, words = BUSY, f"a client of worker {hello.worker} is connected already"
        if status != WELCOME:
            with contextlib.suppress(OSError):
                stream.send(Welcome.pack(status, False, words, self._token, hello))
            stream.close()
            return
        if same:
            assert session is not None
            self._disconnect(session)
        else:
            if session is not None:
                self._give_up(session, "another client has taken its number")
            session = self._sessions[hello.worker] = Session(hello)
        takes_segments = session.can_map and stream.family == socket.AF_UNIX
        try:
            stream.send(Welcome.pack(WELCOME, takes_segments, "", self._token, hello))
        except OSError:  # it comes again
            stream.close()
            session.disconnect()
            return
        connection = Connection(stream, self._most_bytes, self._intake.allocate, self._wake.call)
        self._selector.register(stream, selectors.EVENT_READ, lambda: self._read(session, connection))
        session.connect(connection, hello.takes_segments)

    def _disconnect(self, session: Session) -> None:
        connection = session.connection
        if connection is not None:
            session.disconnect()
            self._selector.unregister(connection.stream)
            connection.close()

    def _give_up(self, session: Session, reason: str | None) -> None:
        self._disconnect(session)
        session.end()
        del self._sessions[session.worker]
        while len(self._given_up) >= _MOST_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]
        self._given_up[session.incarnation] = reason or "it has said goodbye"
        self._work.put(lambda: self._on_gone(session.worker, reason))

    def _read(self, session: Session, connection: Connection) -> None:
        if session.connection is not connection:
            return  # it was closed while others had their turn
        if connection.has_backlog:
            connection.write()
        try:
            for frame in connection.read():
                if not self._intake.take(session, connection, frame):
                    self._give_up(session, None)
                    return
        except EOFError:
            self._disconnect(session)
        except WireError as error:
            _log.warning("server %d drops worker %d: %s", self.endpoint["index"], session.worker, error)
            self._give_up(session, f"it sent what no worker sends: {error}")
        except OSError as error:
            _log.info("the connection of worker %d broke: %s", session.worker, error)
            self._disconnect(session)

    def close_in_child(self) -> None:
        """After a fork, where the threads do not run."""
        self._entrance.close_in_child()
        for connection in self._connections():
            connection.stream.close()
