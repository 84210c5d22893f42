"""Streams of frames between processes that know a common key, for peers (`comm.peers`) and servers (`colossus.server`).

One thread of each process runs an asyncio loop that reads and writes all streams, through raw sockets, into and out of
the callers' memory. A frame is a *head* of a few bytes and a *payload*, which is read into memory that its receiver
allocates.

`colossus.comm.listener` makes streams. A broken stream is not made again: both ends get an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

T = TypeVar("T")
Done = Callable[[], object]
#: the pieces to write one after the other, and the function to call then
_Frame = tuple[Sequence[bytes | memoryview], Done | None]

#: the silence after which an end sends a heartbeat
BEAT_SECONDS = 1.0

_FRAME = struct.Struct("<IQ")  # bytes of the head, bytes of the payload
_MAX_HEAD_BYTES = 1 << 20
#: in the place of the head's size: the stream ends here; a heartbeat
_FAREWELL, _BEAT = 0xFFFFFFFF, 0xFFFFFFFE
#: a payload of fewer bytes is written together with its head
_SMALL_BYTES = 1 << 14


class WireError(ValueError):
    """The error of bytes that are not of our protocol."""


class Receiver(Protocol):
    """The object that takes the frames of a stream.

    The thread of the loop calls its methods, which must return at once. A `WireError` of `allocate` or `on_frame` ends
    the stream.
    """

    def allocate(self, head: bytes, size: int) -> Sequence[memoryview]:
        """Return memory of ``size`` bytes in all for the payload of a frame."""

    def on_frame(self, head: bytes) -> None:
        """Take a frame, whose payload lies in the memory of the last `allocate`."""

    def on_end(self, reason: str | None) -> None:
        """Take note that the stream has ended: the other end said goodbye (None), or the reason.

        Not called after `Stream.abort` or `Stream.close`, unless the other end was gone already.
        """


class Stream:
    """One end of a stream. It reads nothing before `start`.

    Attributes:
        about: what the dialer has said of itself.
        last_received: `time.monotonic` when the last bytes came.
    """

    def __init__(self, sock: socket.socket, about: bytes) -> None:
        self.about, self._sock = about, sock
        self.last_received = self._last_sent = time.monotonic()
        self._queue: deque[_Frame] = deque()
        self._lock = threading.Lock()
        self._changed = asyncio.Event()
        self._is_closing = self._is_ended = False
        self._ended = threading.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._receiver: Receiver | None = None
        running_loop().sockets.add(sock)

    def start(self, receiver: Receiver, silence_seconds: float | None = None) -> None:
        """Begin to read; any thread may call this.

        Args:
            receiver: takes the frames.
            silence_seconds: the silence after which the other end counts as dead, or None: silence may last. Both ends
                must set it, since only then both send heartbeats.
        """

        def begin() -> None:
            self._receiver = receiver
            coroutines = [self._read(receiver), self._write()]
            if silence_seconds is not None:
                coroutines.append(self._beat(silence_seconds))
            self._tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]

        running_loop().call(begin)

    # -- out, from any thread -------------------------------------------------------------------------------

    def send(self, head: bytes, payload: Sequence[memoryview] = (), done: Done | None = None) -> None:
        """Queue a frame, and return at once.

        Args:
            head: a few bytes that say what the payload is.
            payload: pieces of format ``B``, which must not change before ``done``.
            done: called once, when the frame has been written or the stream has ended before.
        """
        size = sum(map(len, payload))
        start = _FRAME.pack(len(head), size) + head
        pieces: list[bytes | memoryview] = [start, *payload]
        if size < _SMALL_BYTES:
            pieces = [b"".join(pieces)]
        self._put((pieces, done))

    def _put(self, frame: _Frame, *, is_last: bool = False) -> None:
        with self._lock:
            is_open = not self._is_ended and not self._is_closing
            self._is_closing |= is_last
            if is_open:
                self._queue.append(frame)
        if is_open:
            running_loop().call(self._changed.set)
        else:
            _finish(frame)

    def close(self, seconds: float = 0.0) -> None:
        """Say goodbye after all queued frames, and wait at most ``seconds`` until the other end has read them."""
        self._put(([_FRAME.pack(_FAREWELL, 0)], None), is_last=True)
        if seconds:
            self._ended.wait(seconds)

    def abort(self) -> None:
        """End the stream at once, without a call of `Receiver.on_end`."""
        self._is_closing = True
        running_loop().call(lambda: self._end("it was closed"))

    # -- the loop -------------------------------------------------------------------------------------------

    async def _read(self, receiver: Receiver) -> None:
        start = memoryview(bytearray(_FRAME.size))
        reason: str | None = None
        try:
            while True:
                await self._fill(start)
                head_bytes, size = _FRAME.unpack(start)
                if head_bytes == _FAREWELL:
                    break
                if head_bytes == _BEAT:
                    continue
                if head_bytes > _MAX_HEAD_BYTES:
                    raise WireError(f"a head of {head_bytes} bytes, where at most {_MAX_HEAD_BYTES} are expected")
                head = bytearray(head_bytes)
                await self._fill(memoryview(head))
                pieces = receiver.allocate(bytes(head), size) if size else ()
                for piece in pieces:
                    await self._fill(piece)
                receiver.on_frame(bytes(head))
                await asyncio.sleep(0)  # other streams get their turn
        except EOFError:
            reason = "its connection was closed"
        except OSError as error:
            reason = f"its connection broke ({error})"
        except Exception as error:
            reason = f"what it sent could not be taken: {type(error).__name__}: {error}"
        self._end(reason)

    async def _fill(self, memory: memoryview) -> None:
        loop = asyncio.get_running_loop()
        while len(memory):
            size = await loop.sock_recv_into(self._sock, memory)
            if not size:
                raise EOFError
            self.last_received = time.monotonic()
            memory = memory[size:]

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._changed.clear()
                while self._queue:
                    frame = self._queue[0]
                    for piece in frame[0]:
                        await loop.sock_sendall(self._sock, piece)
                    self._last_sent = time.monotonic()
                    with self._lock:
                        self._queue.popleft()
                    _finish(frame)
                if self._is_closing:
                    self._sock.shutdown(socket.SHUT_WR)
                    return
                await self._changed.wait()
        except OSError:  # `_read` meets the same end, after it has read what came before
            return

    async def _beat(self, silence_seconds: float) -> None:
        while True:
            await asyncio.sleep(min(BEAT_SECONDS, silence_seconds) / 2)
            if time.monotonic() - self.last_received > silence_seconds:
                self._end(f"it gave no sign of life for {silence_seconds:g} s")
            elif time.monotonic() - self._last_sent > BEAT_SECONDS / 2 and not self._queue:
                self._put(([_FRAME.pack(_BEAT, 0)], None))

    def _end(self, reason: str | None) -> None:
        with self._lock:
            if self._is_ended:
                return
            self._is_ended = True
            frames = tuple(self._queue)
            self._queue.clear()
        for task in self._tasks:
            task.cancel()
        asyncio.get_running_loop().call_soon(self._sock.close)  # the loop must not watch it any more by then
        for frame in frames:
            _finish(frame)
        if self._receiver is not None and not self._is_closing:
            self._receiver.on_end(reason)
        self._ended.set()


def _finish(frame: _Frame) -> None:
    done = frame[1]
    if done is not None:
        done()


# -- the thread -----------------------------------------------------------------------------------------------


class _Loop:
    """The asyncio loop of this process and its thread, which run as long as the process."""

    def __init__(self) -> None:
        self._asyncio = asyncio.new_event_loop()
        #: the sockets that a forked process is to close
        self.sockets: WeakSet[socket.socket] = WeakSet()
        threading.Thread(target=self._asyncio.run_forever, name="colossus-net", daemon=True).start()

    def call(self, function: Callable[[], object]) -> None:
        """Have the thread call a function soon."""
        self._asyncio.call_soon_threadsafe(function)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Have the thread run a coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._asyncio)


_running: _Loop | None = None
#: the loops of the processes that this one was forked from: if they were freed, their selectors' sockets would close
_parent_loops: list[_Loop] = []
_lock = threading.Lock()


def running_loop() -> _Loop:
    global _running
    if _running is None:
        with _lock:
            _running = _running or _Loop()
    return _running


def _after_fork() -> None:
    """Close the sockets in a forked child, whose thread does not run.

    A connection stays open as long as any process has its socket.
    """
    global _running
    if _running is not None:
        for sock in tuple(_running.sockets):
            with contextlib.suppress(OSError):
                sock.close()
        _parent_loops.append(_running)
        _running = None


os.register_at_fork(after_in_child=_after_fork)
