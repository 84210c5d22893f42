"""Streams of frames between processes that know a common key: what peers (`colossus.comm.peers`) and servers
(`colossus.server.rpc`) talk through.

One thread of each process runs an asyncio loop that reads and writes all streams, by raw sockets into and out of the
callers' memory. A frame is a *head*, some bytes, and a *payload*, which is read to where its receiver wants it.

Who connects and who listens prove to each other that they know the key (HMAC-SHA256 over both their challenges, which
are new for each stream, and over what the dialer says of itself), so a recorded greeting is of no use.
Frames are neither authenticated nor encrypted: who can change what the network carries can change them. A stream is
never made again: when it breaks, both ends are told.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from colossus.comm.forked import close_in_children

T = TypeVar("T")
Address = tuple[str, int]
Done = Callable[[], object]

_log = logging.getLogger("colossus.comm")

#: within which who connects must have proven to know the key
GREETING_SECONDS = 10.0
#: connections that have not, of one listener; of more the oldest gives way
MOST_UNKNOWN = 256
#: until the system is asked again for a connection that it could not make: too many files are open, say
PAUSE_SECONDS = 1.0
#: of silence, after which an end that gives signs of life gives one
BEAT_SECONDS = 1.0

_CHALLENGE = struct.Struct("<4s32s")
_MAGIC = b"CLS2"
_ABOUT = struct.Struct("<H")
_PROOF_BYTES = 32

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


@dataclass(eq=False)
class _Frame:
    pieces: Sequence[bytes | memoryview]
    done: Done | None
    num_bytes: int


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
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._changed = asyncio.Event()
        self._is_closing = self._is_ended = False
        self._ended = threading.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._receiver: Receiver | None = None
        _loop().sockets.add(sock)

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

        _loop().call(begin)

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
        self._put(_Frame(pieces, done, size))

    def _put(self, frame: _Frame, *, is_last: bool = False) -> None:
        with self._lock:
            takes = not self._is_ended and not self._is_closing
            self._is_closing |= is_last
            if takes:
                self._queue.append(frame)
                self._num_bytes += frame.num_bytes
        if takes:
            _loop().call(self._changed.set)
        elif frame.done is not None:
            frame.done()

    @property
    def backlog(self) -> int:
        """Bytes of payloads that wait to be written."""
        return self._num_bytes

    def close(self, seconds: float = 0.0) -> None:
        """Say goodbye once all that was sent is written, and wait at most so long until the other end has read it."""
        self._put(_Frame([_FRAME.pack(_FAREWELL, 0)], None, 0), is_last=True)
        if seconds:
            self._ended.wait(seconds)

    def abort(self) -> None:
        """End at once."""
        _loop().call(lambda: self._end("it was closed", tells=False))

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
        except WireError as error:
            reason = f"it sent what nobody of ours sends: {error}"
        except OSError as error:
            reason = f"its connection broke ({error.strerror or error})"
        except Exception as error:
            _log.exception("a stream has failed")
            reason = f"what it sent could not be taken: {type(error).__name__}: {error}"
        self._end(reason, tells=not self._is_closing)

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
                    for piece in frame.pieces:
                        await loop.sock_sendall(self._sock, piece)
                    self._last_sent = time.monotonic()
                    with self._lock:
                        self._queue.popleft()
                        self._num_bytes -= frame.num_bytes
                    if frame.done is not None:
                        frame.done()
                if self._is_closing:
                    self._sock.shutdown(socket.SHUT_WR)
                    return
                await self._changed.wait()
        except OSError:  # who reads is told, also of what came before
            return

    async def _beat(self, silence_seconds: float) -> None:
        beat = _Frame([_FRAME.pack(_BEAT, 0)], None, 0)
        while True:
            await asyncio.sleep(min(BEAT_SECONDS, silence_seconds) / 2)
            if time.monotonic() - self.last_heard > silence_seconds:
                self._end(f"it gave no sign of life for {silence_seconds:g} s", tells=not self._is_closing)
            elif time.monotonic() - self._last_sent > BEAT_SECONDS / 2 and not self._queue:
                self._put(beat)

    def _end(self, reason: str | None, *, tells: bool) -> None:
        with self._lock:
            if self._is_ended:
                return
            self._is_ended = True
            frames = tuple(self._queue)
            self._queue.clear()
            self._num_bytes = 0
        for task in self._tasks:
            task.cancel()
        asyncio.get_running_loop().call_soon(self._sock.close)  # once the loop watches it no more
        for frame in frames:
            if frame.done is not None:
                frame.done()
        if tells and self._receiver is not None:
            self._receiver.on_end(reason)
        self._ended.set()


class Listener:
    """Listens from the beginning.

    Whoever connects must prove within `GREETING_SECONDS` to know the key; of those that have not there are at most
    `MOST_UNKNOWN`, so that strangers can neither keep others out nor use up what the process may open.

    Args:
        host: address to listen at.
        key: known to those that may connect alone.
        on_stream: called by the thread of the loop with each stream that is greeted: takes it, by `Stream.start`.
        name: of what listens, for the log.

    Attributes:
        address: at which it listens.
    """

    def __init__(self, host: str, key: bytes, on_stream: Callable[[Stream], object], name: str) -> None:
        self._key, self._on_stream, self._name = key, on_stream, name
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = socket.create_server((host, 0), family=family, backlog=1024)
        self._sock.setblocking(False)
        self.address: Address = self._sock.getsockname()[:2]
        #: connections that have not said who they are, from the oldest on
        self._unknown: list[asyncio.Task[None]] = []
        self._refusal = ""
        loop = _loop()
        loop.sockets.add(self._sock)
        self._task: asyncio.Task[None] = loop.run(_as_task(self._accept())).result()

    def close(self) -> None:
        """Listen no more; streams stay."""

        def end() -> None:
            for task in (self._task, *self._unknown):
                task.cancel()
            asyncio.get_running_loop().call_soon(self._sock.close)  # once the loop watches it no more

        _loop().run(_called(end)).result()

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(self._sock)
            except OSError as error:
                if self._refusal != str(error):
                    self._refusal = str(error)
                    _log.warning("%s cannot make a connection and tries it again: %s", self._name, error)
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            _loop().sockets.add(sock)
            task = asyncio.create_task(self._let_in(sock))
            self._unknown.append(task)
            await asyncio.sleep(0)  # it begins: one that is cancelled before would not close its socket
            if len(self._unknown) > MOST_UNKNOWN:
                self._unknown[0].cancel()

    async def _let_in(self, sock: socket.socket) -> None:
        why = ""
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                sock.setblocking(False)
                about = await _greet_dialer(sock, self._key)
            self._on_stream(Stream(sock, about))
            return
        except WireError as error:
            why = str(error)
        except (TimeoutError, asyncio.CancelledError):
            why = "it did not say who it is"
        except (OSError, EOFError):  # it has gone again, as who looks for open ports does
            pass
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._unknown.remove(task)
        sock.close()
        if why:
            _log.warning("something connected to %s and was dropped: %s", self._name, why)


def dial(address: Address, key: bytes, about: bytes = b"", seconds: float = 10.0) -> Stream:
    """Connect to a `Listener`. From any thread but the loop's.

    Args:
        about: what the other end is told of this one, at most 64 KiB.
        seconds: in which it must have answered.

    Raises:
        WireError: what answers does not know the key.
        OSError: it cannot be reached, or does not answer in time (`TimeoutError`).
    """

    async def connect() -> Stream:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        _loop().sockets.add(sock)
        try:
            sock.setblocking(False)
            async with asyncio.timeout(seconds):
                await asyncio.get_running_loop().sock_connect(sock, address)
                await _greet_listener(sock, key, about)
            return Stream(sock, about)
        except TimeoutError:
            sock.close()
            raise TimeoutError(f"nothing has answered at {_shown(address)} within {seconds:g} s") from None
        except EOFError:
            sock.close()
            raise WireError(f"what answers at {_shown(address)} does not take the key of this process") from None
        except BaseException:
            sock.close()
            raise

    return _loop().run(connect()).result()


def _shown(address: Address) -> str:
    host, port = address
    return f"{f'[{host}]' if ':' in host else host}:{port}"


# -- the greeting ---------------------------------------------------------------------------------------------


async def _greet_dialer(sock: socket.socket, key: bytes) -> bytes:
    """At the end that listens: what the other says of itself."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    mine = secrets.token_bytes(32)
    await _send(sock, _CHALLENGE.pack(_MAGIC, mine))
    theirs = _read_challenge(await _receive(sock, _CHALLENGE.size))
    (size,) = _ABOUT.unpack(await _receive(sock, _ABOUT.size))
    proof = await _receive(sock, _PROOF_BYTES)
    about = await _receive(sock, size)
    if not hmac.compare_digest(proof, _proof(key, b"dials", mine, theirs, about)):
        raise WireError("it does not know the key of this run")
    await _send(sock, _proof(key, b"listens", mine, theirs, about))
    return about


async def _greet_listener(sock: socket.socket, key: bytes, about: bytes) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    mine = secrets.token_bytes(32)
    theirs = _read_challenge(await _receive(sock, _CHALLENGE.size))
    proof = _proof(key, b"dials", theirs, mine, about)
    await _send(sock, _CHALLENGE.pack(_MAGIC, mine) + _ABOUT.pack(len(about)) + proof + about)
    if not hmac.compare_digest(await _receive(sock, _PROOF_BYTES), _proof(key, b"listens", theirs, mine, about)):
        raise WireError("what answers there does not know the key of this run")


def _read_challenge(raw: bytes) -> bytes:
    magic, challenge = _CHALLENGE.unpack(raw)
    if magic != _MAGIC:
        raise WireError("it is no process of this version of colossus")
    return bytes(challenge)


def _proof(key: bytes, role: bytes, of_listener: bytes, of_dialer: bytes, about: bytes) -> bytes:
    return hmac.digest(key, b"colossus %s:" % role + of_listener + of_dialer + about, "sha256")


async def _send(sock: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, data)


async def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        received = await asyncio.get_running_loop().sock_recv(sock, size - len(data))
        if not received:
            raise EOFError
        data += received
    return data


# -- the thread -----------------------------------------------------------------------------------------------


class _Loop:
    """The loop of this process and its thread, which end with it."""

    def __init__(self) -> None:
        self._asyncio = asyncio.new_event_loop()
        #: those that a forked process is to close
        self.sockets: WeakSet[socket.socket] = WeakSet()
        threading.Thread(target=self._asyncio.run_forever, name="colossus-net", daemon=True).start()
        close_in_children(self)

    def call(self, function: Callable[[], object]) -> None:
        """Have the thread call it, soon."""
        self._asyncio.call_soon_threadsafe(function)

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Have the thread run it."""
        return asyncio.run_coroutine_threadsafe(work, self._asyncio)

    def close_in_child(self) -> None:
        """After a fork, where the thread does not run: a connection stays open as long as anybody has it."""
        global _running
        for sock in tuple(self.sockets):
            with contextlib.suppress(OSError):
                sock.close()
        _left_behind.append(self)
        _running = None


_running: _Loop | None = None
#: those of the processes that this one was forked from: Python would close what their selectors watch
_left_behind: list[_Loop] = []
_lock = threading.Lock()


def _loop() -> _Loop:
    global _running
    if _running is None:
        with _lock:
            _running = _running or _Loop()
    return _running


async def _as_task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.create_task(work)


async def _called(function: Callable[[], T]) -> T:
    return function()
