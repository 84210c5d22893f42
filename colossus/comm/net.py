"""Streams of frames between processes that know a common key: what peers (`colossus.comm.peers`) and servers
(`colossus.server`) talk through.

One thread of each process runs an asyncio loop that reads and writes all streams, by raw sockets into and out of the
callers' memory. A frame is a *head*, some bytes, and a *payload*, which is read to where its receiver wants it.

How streams are made is in `colossus.comm.listener`. A stream is never made again: when it breaks, both ends are told.
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
#: what is written one after the other, and what is called then
_Frame = tuple[Sequence[bytes | memoryview], Done | None]

#: of silence, after which an end that gives signs of life gives one
BEAT_SECONDS = 1.0

_FRAME = struct.Struct("<IQ")  # bytes of the head, bytes of the payload
_MOST_HEAD_BYTES = 1 << 20
#: in the place of the head's bytes: nothing follows; its sender lives
_FAREWELL, _BEAT = 0xFFFFFFFF, 0xFFFFFFFE
#: a payload of fewer bytes is written together with its head
_SMALL_BYTES = 1 << 14


class WireError(ValueError):
    """Bytes that nobody of ours sends."""


class Receiver(Protocol):
    """Whom a stream tells what comes. Its methods are called by the thread of the loop, and return at once; a
    `WireError` of the first two ends the stream."""

    def allocate(self, head: bytes, size: int) -> Sequence[memoryview]:
        """Memory, ``size`` bytes in all, for the payload of a frame."""

    def on_frame(self, head: bytes) -> None:
        """A frame has come, and its payload is where `allocate` has said last."""

    def on_end(self, reason: str | None) -> None:
        """Nothing comes any more: the other end has said goodbye (None), or why not. Not called after `Stream.close`,
        but where that finds the other end gone already."""


class Stream:
    """One end of a stream. Nothing is read before `start`.

    Attributes:
        about: what the dialer has said of itself.
        last_heard: `time.monotonic` when something came last.
    """

    def __init__(self, sock: socket.socket, about: bytes) -> None:
        self.about, self._sock = about, sock
        self.last_heard = self._last_sent = time.monotonic()
        self._queue: deque[_Frame] = deque()
        self._lock = threading.Lock()
        self._changed = asyncio.Event()
        self._is_closing = self._is_ended = False
        self._ended = threading.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._receiver: Receiver | None = None
        running_loop().sockets.add(sock)

    def start(self, receiver: Receiver, silence_seconds: float | None = None) -> None:
        """Begin to read. From any thread.

        Args:
            silence_seconds: after which the other end is taken for dead; both ends must give it, since then both give
                signs of life. None: silence says nothing.
        """

        def begin() -> None:
            self._receiver = receiver
            work = [self._read(receiver), self._write()]
            if silence_seconds is not None:
                work.append(self._beat(silence_seconds))
            self._tasks = [asyncio.create_task(each) for each in work]

        running_loop().call(begin)

    # -- out, from any thread -------------------------------------------------------------------------------

    def send(self, head: bytes, payload: Sequence[memoryview] = (), done: Done | None = None) -> None:
        """Queue a frame, and return at once.

        Args:
            payload: of format ``B``; must not change before ``done``.
            done: called once, when it has been written, or will not be since the stream has ended.
        """
        size = sum(map(len, payload))
        start = _FRAME.pack(len(head), size) + head
        pieces: list[bytes | memoryview] = [start, *payload]
        if size < _SMALL_BYTES:
            pieces = [b"".join(pieces)]
        self._put((pieces, done))

    def _put(self, frame: _Frame, *, is_last: bool = False) -> None:
        with self._lock:
            takes = not self._is_ended and not self._is_closing
            self._is_closing |= is_last
            if takes:
                self._queue.append(frame)
        if takes:
            running_loop().call(self._changed.set)
        else:
            _finish(frame)

    def close(self, seconds: float = 0.0) -> None:
        """Say goodbye once all that was sent is written, and wait at most so long until the other end has read it."""
        self._put(([_FRAME.pack(_FAREWELL, 0)], None), is_last=True)
        if seconds:
            self._ended.wait(seconds)

    def abort(self) -> None:
        """End at once."""
        self._is_closing = True  # nobody is told
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
                if head_bytes > _MOST_HEAD_BYTES:
                    raise WireError(f"a head of {head_bytes} bytes, where at most {_MOST_HEAD_BYTES} are expected")
                head = bytearray(head_bytes)
                await self._fill(memoryview(head))
                pieces = receiver.allocate(bytes(head), size) if size else ()
                for piece in pieces:
                    await self._fill(piece)
                receiver.on_frame(bytes(head))
                await asyncio.sleep(0)  # others have their turn
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
            self.last_heard = time.monotonic()
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
        except OSError:  # who reads is told, also of what came before
            return

    async def _beat(self, silence_seconds: float) -> None:
        while True:
            await asyncio.sleep(min(BEAT_SECONDS, silence_seconds) / 2)
            if time.monotonic() - self.last_heard > silence_seconds:
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
        asyncio.get_running_loop().call_soon(self._sock.close)  # once the loop watches it no more
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
    """The loop of this process and its thread, which end with it."""

    def __init__(self) -> None:
        self._asyncio = asyncio.new_event_loop()
        #: those that a forked process is to close
        self.sockets: WeakSet[socket.socket] = WeakSet()
        threading.Thread(target=self._asyncio.run_forever, name="colossus-net", daemon=True).start()

    def call(self, function: Callable[[], object]) -> None:
        """Have the thread call it, soon."""
        self._asyncio.call_soon_threadsafe(function)

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Have the thread run it."""
        return asyncio.run_coroutine_threadsafe(work, self._asyncio)


_running: _Loop | None = None
#: those of the processes that this one was forked from: Python would close what their selectors watch
_left_behind: list[_Loop] = []
_lock = threading.Lock()


def running_loop() -> _Loop:
    global _running
    if _running is None:
        with _lock:
            _running = _running or _Loop()
    return _running


def _after_fork() -> None:
    """In a child, where the thread does not run: a connection stays open as long as anybody has it."""
    global _running
    if _running is not None:
        for sock in tuple(_running.sockets):
            with contextlib.suppress(OSError):
                sock.close()
        _left_behind.append(_running)
        _running = None


os.register_at_fork(after_in_child=_after_fork)
