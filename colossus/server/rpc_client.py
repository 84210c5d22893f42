"""The end of a worker: its calls, and one thread that reads, and connects again when the connection is lost."""

from __future__ import annotations

import secrets
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from colossus import machine
from colossus.comm.buffer_pool import BufferPool
from colossus.comm.forked import close_in_children, keep
from colossus.comm.peer_wire import WireError
from colossus.comm.wake import Wake
from colossus.server import wire
from colossus.server.beats import BEAT_SECONDS, LEAST_TIMEOUT_SECONDS
from colossus.server.connect import address_of, connect
from colossus.server.connection import Connection
from colossus.server.environment import wrong_endpoint
from colossus.server.frame_parser import Frame
from colossus.server.messages import Call, Refused, Reply, ServerGone
from colossus.server.outgoing import Outgoing
from colossus.server.pending_calls import Pending, PendingCalls
from colossus.server.reply_arrays import ReplyArrays
from colossus.server.segments import SegmentMap, SegmentPool
from colossus.server.wire import Hello

_POOLED_BYTES = 256 << 20
_LOOK_SECONDS = 0.2
#: after which replies are acknowledged without a request
_ACKNOWLEDGE_SECONDS = 0.02
_MOST_UNACKNOWLEDGED = 32
#: in which what is left must be written at the end
_CLOSE_SECONDS = 2.0


class RpcClient:
    """The calls of one worker at one server. From any thread.

    Args:
        endpoint: `RpcServer.endpoint`.
        token: of the run.
        worker: number of this worker, an int32; one client of a number at a time.
        timeout_seconds: of silence after which the server is taken for dead, at least `LEAST_TIMEOUT_SECONDS`.
        on_progress: called by a thread of the client whenever a reply has come.
        shared_memory: whether arrays may go through it, where the server is on this host.

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
        *,
        shared_memory: bool = True,
    ) -> None:
        if (wrong := wrong_endpoint(endpoint)) is not None:
            raise ValueError(f"the endpoint of a server: {wrong}")
        if timeout_seconds < LEAST_TIMEOUT_SECONDS:
            raise ValueError(
                f"timeout_seconds = {timeout_seconds:g}: a sign of life comes each {BEAT_SECONDS:g} s, so that a "
                f"server can be taken for dead after {LEAST_TIMEOUT_SECONDS:g} s at the earliest"
            )
        self.index: int = endpoint["index"]
        self.address = address_of(endpoint)
        self._endpoint, self._token, self._worker = endpoint, token, worker
        self._timeout, self._on_progress = timeout_seconds, on_progress
        self._most_bytes = machine.memory_bytes()[0] // 4
        self._incarnation = secrets.token_bytes(wire.INCARNATION_BYTES)
        self._calls = PendingCalls()
        self._acknowledged: list[int] = []
        self._read_at = 0.0
        self._connection: Connection | None = None
        self._segments, self._mapped = SegmentPool(), SegmentMap()
        self._can_map, self._takes_segments = shared_memory, False
        self._arrays = ReplyArrays(self._most_bytes, self._mapped, self._calls.into_of)
        self._buffers = BufferPool(_POOLED_BYTES)
        self._last_sign: float | None = None
        self._is_closing = False
        self._selector = selectors.DefaultSelector()
        self._wake = Wake()
        self._selector.register(self._wake, selectors.EVENT_READ)
        try:
            self._connect(is_new=True)
        except BaseException:
            self._selector.close()
            self._wake.close()
            raise
        self._thread = threading.Thread(target=self._run, name="colossus-server-client", daemon=True)
        self._thread.start()
        close_in_children(self)

    def call(
        self,
        op: str,
        header: dict[str, Any] | None = None,
        arrays: Sequence[Tensor] = (),
        into: Sequence[Tensor] | None = None,
    ) -> Call:
        """Start a call. Waits while too much is under way.

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
        self._calls.wait_for_room()
        segments = self._segments if self._takes_segments else None
        message = Outgoing(wire.REQUEST, {"o": op, "h": header or {}}, arrays, segments, self._buffers)
        call = Call(op, f"server {self.index} at {self.address}")
        with self._calls.changed:
            if self._calls.gone is not None or self._is_closing:
                message.release()
                raise self._calls.gone or RuntimeError(
                    f"a call {op!r} at server {self.index} by a client that was closed"
                )
            self._calls.add(Pending(call, message, into))
            if self._connection is not None:
                self._acknowledge(self._connection)
                message.send(self._connection, self._takes_segments)
                self._connection.forget(self._segments.take_dropped())
        return call

    def close(self, patience_seconds: float | None = None) -> None:
        """Wait for the calls under way, as long as the server lives, and say goodbye. Idempotent.

        Args:
            patience_seconds: for which calls are waited for; None: without end.
        """
        if not self._is_closing:
            self._calls.wait_for_end(patience_seconds)
        self._is_closing = True
        self._wake.call()
        if self._thread is not threading.current_thread():
            self._thread.join()
            self._wake.close()
        keep(self)

    # -- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing and self._calls.gone is None:
                self._turn()
            self._say_goodbye()
        except Exception as error:
            self._lose(f"the thread of its client failed: {type(error).__name__}: {error}")
        finally:
            if self._connection is not None:
                self._connection.close()
            self._segments.close()
            self._mapped.close()
            self._selector.close()
            self._wake.close_reading()

    def _turn(self) -> None:
        connection = self._connection
        assert connection is not None
        connection.watch(self._selector)
        self._selector.select(_ACKNOWLEDGE_SECONDS if self._acknowledged else _LOOK_SECONDS)
        self._wake.drain()
        if connection.has_backlog:
            connection.write()
        try:
            for frame in connection.read():
                self._take(connection, frame)
        except (OSError, EOFError) as error:
            self._reconnect(str(error) or type(error).__name__)
            return
        except WireError as error:
            self._lose(f"it sent what no server sends: {error}")
            return
        self._last_sign = connection.last_heard
        now = time.monotonic()
        if now - connection.last_heard > self._timeout:
            self._lose(f"it gave no sign of life for {self._timeout:g} s")
            return
        if self._acknowledged and (
            now - self._read_at > _ACKNOWLEDGE_SECONDS or len(self._acknowledged) >= _MOST_UNACKNOWLEDGED
        ):
            with self._calls.changed:
                self._acknowledge(connection)
        connection.beat(BEAT_SECONDS)

    def _say_goodbye(self) -> None:
        connection = self._connection
        if connection is None or self._calls.gone is not None:
            return
        self._acknowledge(connection)
        connection.send(wire.frame(wire.BYE))
        deadline = time.monotonic() + _CLOSE_SECONDS
        while connection.has_backlog and time.monotonic() < deadline:
            connection.watch(self._selector)
            self._selector.select(_LOOK_SECONDS)
            connection.write()

    def _acknowledge(self, connection: Connection) -> None:
        if self._acknowledged:
            connection.send(wire.frame(wire.ACKNOWLEDGE, wire.encode(self._acknowledged)))
            self._acknowledged = []

    def _reconnect(self, why: str) -> None:
        with self._calls.changed:
            connection, self._connection = self._connection, None
        assert connection is not None
        self._selector.unregister(connection.stream)
        connection.close()
        try:
            self._connect(is_new=False, why=why)
        except (ServerGone, Refused) as error:
            self._lose(error.reason if isinstance(error, ServerGone) else str(error))

    def _connect(self, *, is_new: bool, why: str = "") -> None:
        hello = Hello.make(self._worker, self._incarnation, is_new=is_new, takes_segments=self._can_map)
        stream, takes_segments = connect(
            self._endpoint, self._token, hello, self._timeout, why, self._last_sign, lambda: self._is_closing
        )
        connection = Connection(stream, self._most_bytes, self._arrays.allocate, self._wake.call)
        self._last_sign = connection.last_heard
        self._selector.register(stream, selectors.EVENT_READ)
        with self._calls.changed:
            self._takes_segments = takes_segments and self._can_map
            if not is_new:
                self._acknowledged = []
                self._calls.resume(connection, self._takes_segments)
            self._connection = connection

    def _lose(self, reason: str) -> None:
        self._calls.lose(ServerGone(self.index, self.address, reason, self._last_sign))

    def _take(self, connection: Connection, frame: Frame) -> None:
        match frame.head.kind:
            case wire.REPLY | wire.REFUSAL:
                self._take_reply(frame)
            case wire.PING:
                pass
            case wire.SEGMENT:
                try:
                    self._mapped.add(frame.header, connection.take_descriptor())
                except OSError:
                    self._can_map = False  # told with the next greeting
                    raise
            case wire.FORGET:
                self._mapped.forget(frame.header)
            case wire.FAILED:
                self._lose(str(frame.header))
            case kind:
                raise WireError(f"a frame of kind {kind}, which is a worker's")

    def _take_reply(self, frame: Frame) -> None:
        header, sequence = frame.header, frame.head.sequence
        if not isinstance(header, dict):
            raise WireError("a reply without a header")
        reply: Reply | None = None
        error: Exception | None = None
        pending = self._calls.get(sequence)
        if pending is not None:
            if frame.head.kind == wire.REFUSAL:
                error = Refused(str(header.get("e")))
            else:
                try:
                    reply = Reply(header.get("h") or {}, self._arrays.of(frame, pending.into))
                except ValueError as wrong:
                    if isinstance(wrong, WireError):
                        raise
                    error = wrong
        with self._calls.changed:
            self._acknowledged.append(sequence)
            self._read_at = time.monotonic()
        if pending is None:  # it came twice
            return
        self._calls.remove(sequence)
        pending.message.release()
        pending.call.finish(reply, error)
        self._on_progress()

    def close_in_child(self) -> None:
        """After a fork, where the thread does not run."""
        if self._connection is not None:
            self._connection.stream.close()
