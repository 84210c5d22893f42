"""Messages between the ranks of one axis that nobody waits for to be sent, and that outlive the death of a rank.

What c10d cannot do: its groups break as a whole when a member dies, and its receives name their sender beforehand. Each
rank has one thread that reads and writes all connections, so that messages travel while the main thread computes.
Tensors on an accelerator are copied to the host by the caller.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from weakref import WeakSet

import torch
from torch import Tensor

from colossus import machine
from colossus.comm import accounting
from colossus.comm.objects import all_gather_object
from colossus.comm.peer_wire import BYE, HEADER_BYTES, HELLO_BYTES, Header, WireError, hello, read_hello
from colossus.context.groups import AxisGroup

_log = logging.getLogger("colossus.comm")
_CHUNK = 1 << 20
#: how long a rank that closes waits until what it has sent is with the others
_CLOSE_SECONDS = 10.0
#: how often a rank that waits looks up
_LOOK_SECONDS = 1.0
_LOOPBACK = "127.0.0.1"


class PeerGone(RuntimeError):
    """A peer has died: its connection was closed without a farewell.

    Attributes:
        index: of the peer in the group.
    """

    def __init__(self, index: int, text: str) -> None:
        super().__init__(text)
        self.index = index


@dataclass(eq=False)
class Message:
    """What a peer has sent.

    Attributes:
        source: its index in the group.
        data: uint8 [bytes], on the host; give it back with `PeerLinks.release` when it is not needed any more.
    """

    source: int
    kind: int
    number: int
    meta: bytes
    data: Tensor


@dataclass(eq=False)
class _Outgoing:
    """A connection to a peer, made when there is something to send."""

    stream: socket.socket | None = None
    #: what is left to be written, and what is to be called when a piece has been
    queue: deque[tuple[memoryview, Callable[[], None] | None]] = field(default_factory=deque)
    is_connecting: bool = False
    events: int = 0


@dataclass(eq=False)
class _Incoming:
    """A connection from a peer, in the midst of a greeting, a header, or a message."""

    stream: socket.socket
    source: int | None = None
    header: Header | None = None
    into: memoryview = field(default_factory=lambda: memoryview(bytearray(HELLO_BYTES)))
    filled: int = 0
    meta: bytes | None = None
    data: Tensor | None = None
    said_bye: bool = False


class PeerLinks:
    """The links of this rank to all others of its group. Collective: all of them make theirs at the same time.

    Args:
        group: peers are named by index in it.
        most_bytes: of the data of one message; what claims more is not ours.
        timeout_seconds: of silence of a peer that is waited for.
        pinned: memory is page-locked, for copies to and from an accelerator.

    Attributes:
        waited_seconds: that `receive` has waited so far.
        bytes_sent: by `send` so far.
        on_arrival: called by the thread of the links when a message has come or a peer is gone; returns at once.
    """

    def __init__(self, group: AxisGroup, most_bytes: int, timeout_seconds: float, *, pinned: bool = False) -> None:
        self._pinned = pinned
        # of a copy: its indices are those of all, also when some of them have died
        self.group, self._most_bytes, self._timeout = replace(group), most_bytes, timeout_seconds
        self.waited_seconds, self.bytes_sent = 0.0, 0
        self.on_arrival: Callable[[], object] = lambda: None
        self._changed = threading.Condition()
        self._inbox: dict[tuple[int, int, int], deque[Message]] = {}
        self._gone: dict[int, str] = {}
        #: peers that take nothing any more, why, and since when: they may have ended well
        self._deaf: dict[int, tuple[str, float]] = {}
        #: peers that said goodbye
        self._left: set[int] = set()
        #: from whom there is or was a connection
        self._heard: set[int] = set()
        self._pool: dict[int, list[Tensor]] = {}
        self._outgoing = {index: _Outgoing() for index in range(group.size) if index != group.index}
        self._incoming: list[_Incoming] = []
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._closing = self._closed = False
        self._failure: BaseException | None = None
        host = _own_address(group)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=max(16, group.size))
        self._listener.setblocking(False)
        offer = (self._listener.getsockname()[:2], secrets.token_bytes(32))
        offers = all_gather_object(offer, group)
        self._addresses = [address for address, _ in offers]
        self._key = offers[0][1]
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._drain_wake)
        self._thread = threading.Thread(target=self._run, name="colossus-peers", daemon=True)
        self._thread.start()
        _open.add(self)

    # -- for the main thread ------------------------------------------------------------------------------

    def buffer(self, size: int) -> Tensor:
        """Memory of ``size`` bytes, uint8, on the host: used again after `send(owned=True)` or `release`."""
        with self._changed:
            free = self._pool.get(size)
            if free:
                return free.pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def release(self, data: Tensor) -> None:
        """Give back the memory of `buffer` or of a message."""
        if data.numel():
            with self._changed:
                self._pool.setdefault(data.numel(), []).append(data)

    def send(
        self,
        to: int | list[int],
        kind: int,
        number: int,
        data: Tensor | None = None,
        meta: bytes = b"",
        *,
        dtype: torch.dtype = torch.uint8,
        owned: bool = False,
    ) -> None:
        """Start to send a message to a peer or to several, and return at once. Peers that are gone are left out.

        Args:
            data: uint8, contiguous, on the host; must not be changed any more.
            dtype: of what is in it, for the count.
            owned: ``data`` came from `buffer`, and goes back there once it has been sent.
        """
        self._raise_failure()
        targets = [to] if isinstance(to, int) else to
        targets = [index for index in targets if index not in self._gone and index not in self._deaf]
        size = 0 if data is None else data.numel()
        for counter in accounting.listeners:
            for _ in targets:
                counter.add("send", str(self.group), dtype, size)
        self.bytes_sent += size * len(targets)
        header = Header(kind, number, len(meta), size).pack() + meta
        left = len(targets)

        def done() -> None:
            nonlocal left
            left -= 1
            if owned and not left:
                assert data is not None
                self.release(data)

        if not targets and owned and data is not None:
            self.release(data)
        view = None if data is None or not size else memoryview(data.numpy())  # type: ignore[arg-type]
        with self._changed:
            for index in targets:
                out = self._outgoing[index]
                out.queue.append((memoryview(header), done if view is None else None))
                if view is not None:
                    out.queue.append((view, done))
        self._wake()

    def receive(self, source: int, kind: int, number: int) -> Message:
        """Wait for a message.

        Raises:
            PeerGone: its sender died or closed its links before it had sent it.
            RuntimeError: it was silent for too long.
        """
        key, began = (source, kind, number), time.monotonic()
        with self._changed:
            while True:
                found = self._inbox.get(key)
                if found:
                    message = found.popleft()
                    if not found:
                        del self._inbox[key]
                    self.waited_seconds += time.monotonic() - began
                    return message
                self._raise_failure()
                if (reason := self.lost(source)) is not None:
                    raise PeerGone(source, f"{self.name(source)} has gone: {reason}")
                left = min(began + self._timeout - time.monotonic(), _LOOK_SECONDS)
                if time.monotonic() - began > self._timeout:
                    raise RuntimeError(
                        f"timeout: {self.name(source)} did not send its message {number} within {self._timeout:g} s"
                    )
                self._changed.wait(max(left, 0.0))

    def lost(self, source: int) -> str | None:
        """Why nothing can come from a peer any more, None where something can."""
        if source in self._gone:
            return self._gone[source]
        if source in self._left:
            return "it has closed its links"
        if source in self._heard or source not in self._deaf:
            return None
        reason, since = self._deaf[source]
        return reason if time.monotonic() - since > _LOOK_SECONDS else None  # its own connection may be on its way

    def take(self, kind: int) -> list[Message]:
        """All messages of a kind that have come and were not received, without waiting; by source and number."""
        with self._changed:
            self._raise_failure()
            found = sorted(key for key in self._inbox if key[1] == kind)
            return [message for key in found for message in self._inbox.pop(key)]

    def has_come(self, kind: int) -> bool:
        """Whether `take` would give any."""
        with self._changed:
            return any(key[1] == kind for key in self._inbox)

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Wait until something comes, or ``until()``, which is called under the lock, is true."""
        with self._changed:
            if not until():
                self._changed.wait(seconds)

    def has(self, source: int, kind: int, number: int) -> bool:
        """Whether a message has come and was not received."""
        return (source, kind, number) in self._inbox

    def nudge(self) -> None:
        """Let who waits look again. From any thread."""
        with self._changed:
            self._changed.notify_all()

    def lose(self, index: int, reason: str) -> None:
        """A peer is known to have died, whatever its connections say. From any thread."""
        self._lose(index, reason)
        self._wake()

    @property
    def gone(self) -> dict[int, str]:
        """Peers that died, and what was seen of it."""
        return dict(self._gone)

    def backlog(self, to: int) -> int:
        """Bytes that wait to be sent to a peer."""
        return sum(len(view) for view, _ in tuple(self._outgoing[to].queue))

    def name(self, index: int) -> str:
        return f"rank {self.group.ranks[index]} (replica {index})"

    def close(self) -> None:
        """Wait until all that was sent is with the others, as long as they live, and say goodbye."""
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            with self._changed:
                for index, out in self._outgoing.items():
                    if (out.stream is not None or out.queue) and index not in self._deaf:
                        out.queue.append((memoryview(Header(BYE, 0, 0, 0).pack()), None))
                self._closing = True
            self._wake()
            self._thread.join(_CLOSE_SECONDS)
        for stream in [self._listener, *(out.stream for out in self._outgoing.values())]:
            if stream is not None:
                stream.close()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the thread of the links between replicas failed: {self._failure}") from self._failure

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"w")
        except BlockingIOError:  # it is awake
            pass
        except BrokenPipeError:
            self._raise_failure()

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        deadline = None
        try:
            while True:
                with self._changed:
                    for index in list(self._outgoing):
                        self._watch(index)
                    if self._closing:
                        deadline = deadline or time.monotonic() + _CLOSE_SECONDS
                        if not any(out.queue for out in self._outgoing.values()) or time.monotonic() > deadline:
                            break
                for key, _ in self._selector.select(0.5):
                    key.data()
        except BaseException as error:  # told by the main thread
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            for key in list(self._selector.get_map().values()):
                self._selector.unregister(key.fileobj)
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
            self._selector.close()
            os.close(self._wake_read)

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _watch(self, index: int) -> None:
        """Have a connection that is wanted, and be told when it can be written."""
        out = self._outgoing[index]
        if not out.queue:
            return
        if index in self._gone or index in self._deaf:
            self._drop_queue(index)
            return
        if out.stream is None:
            host, port = self._addresses[index]
            out.stream = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            out.stream.setblocking(False)
            out.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            out.queue.appendleft((memoryview(hello(self._key, self.group.index, index)), None))
            out.stream.connect_ex((host, port))
        if not out.events:
            out.events = selectors.EVENT_WRITE
            self._selector.register(out.stream, out.events, lambda: self._write(index))

    def _write(self, index: int) -> None:
        out = self._outgoing[index]
        assert out.stream is not None
        try:
            while out.queue:
                view, done = out.queue[0]
                sent = out.stream.send(view[:_CHUNK])
                if sent < len(view):
                    out.queue[0] = (view[sent:], done)
                    continue
                with self._changed:
                    out.queue.popleft()
                if done is not None:
                    done()
        except BlockingIOError:
            return
        except OSError as error:
            with self._changed:
                self._deaf[index] = f"nothing can be sent to it ({error.strerror or error})", time.monotonic()
                self._changed.notify_all()
            self._drop_queue(index)
        if out.events:
            self._selector.unregister(out.stream)
            out.events = 0

    def _lose(self, index: int, reason: str) -> None:
        """A peer has died."""
        with self._changed:
            self._gone.setdefault(index, reason)
            self._changed.notify_all()
        self.on_arrival()

    def _drop_queue(self, index: int) -> None:
        out = self._outgoing[index]
        with self._changed:
            dropped = [done for _, done in out.queue if done is not None]
            out.queue.clear()
        for done in dropped:
            done()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                stream, _ = self._listener.accept()
                stream.setblocking(False)
                incoming = _Incoming(stream)
                self._incoming.append(incoming)
                self._selector.register(stream, selectors.EVENT_READ, lambda incoming=incoming: self._read(incoming))

    def _read(self, incoming: _Incoming) -> None:
        try:
            for _ in range(8):  # then others have their turn
                size = incoming.stream.recv_into(incoming.into[incoming.filled :][:_CHUNK])
                if not size:
                    self._ended(incoming, "its connection was closed")
                    return
                incoming.filled += size
                if incoming.filled == len(incoming.into):
                    self._advance(incoming)
        except BlockingIOError:
            return
        except WireError as error:
            _log.warning("something connected to the links between replicas and was dropped: %s", error)
            self._ended(incoming, f"it sent what no replica sends: {error}")
        except OSError as error:
            self._ended(incoming, f"its connection broke ({error.strerror or error})")

    def _advance(self, incoming: _Incoming) -> None:
        """What was being read is complete."""
        if incoming.source is None:
            raw = bytes(incoming.into)
            incoming.source = read_hello(raw, self._key, self.group.index, self.group.size)
            self._heard.add(incoming.source)
            self._expect(incoming, bytearray(HEADER_BYTES))
        elif incoming.header is None:
            incoming.header = Header.unpack(bytes(incoming.into), self._most_bytes)
            incoming.said_bye = incoming.header.kind == BYE
            self._next_part(incoming)
        elif incoming.meta is None:
            incoming.meta = bytes(incoming.into)
            self._next_part(incoming)
        else:
            self._complete(incoming)

    def _next_part(self, incoming: _Incoming) -> None:
        header = incoming.header
        assert header is not None
        if incoming.meta is None and header.meta_bytes:
            self._expect(incoming, bytearray(header.meta_bytes))
            return
        incoming.meta = incoming.meta or b""
        incoming.data = self.buffer(header.data_bytes)
        if header.data_bytes:
            self._expect(incoming, incoming.data.numpy())
        else:
            self._complete(incoming)

    def _complete(self, incoming: _Incoming) -> None:
        header, source = incoming.header, incoming.source
        assert header is not None
        assert source is not None
        assert incoming.meta is not None
        assert incoming.data is not None
        if not incoming.said_bye:
            message = Message(source, header.kind, header.number, incoming.meta, incoming.data)
            with self._changed:
                self._inbox.setdefault((source, header.kind, header.number), deque()).append(message)
                self._changed.notify_all()
            self.on_arrival()
        incoming.header = incoming.meta = incoming.data = None
        self._expect(incoming, bytearray(HEADER_BYTES))

    @staticmethod
    def _expect(incoming: _Incoming, memory: object) -> None:
        incoming.into, incoming.filled = memoryview(memory), 0  # type: ignore[arg-type]

    def _ended(self, incoming: _Incoming, reason: str) -> None:
        self._selector.unregister(incoming.stream)
        self._incoming.remove(incoming)
        incoming.stream.close()
        if incoming.source is None:
            return
        if not incoming.said_bye:
            self._lose(incoming.source, reason)
            return
        with self._changed:
            self._left.add(incoming.source)
            self._changed.notify_all()


_open: WeakSet[PeerLinks] = WeakSet()


def _close_in_child() -> None:
    """A forked process (a data loader's worker) must not keep the connections of a rank that dies."""
    for links in tuple(_open):
        streams = [out.stream for out in links._outgoing.values()] + [each.stream for each in links._incoming]
        for stream in (links._listener, *streams):
            if stream is not None:
                stream.close()


os.register_at_fork(after_in_child=_close_in_child)


def _own_address(group: AxisGroup) -> str:
    """The address of this host at which the other ranks reach it: that of gloo's interface where it is set, else that
    from which the first rank's host is reached. Collective."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    own = machine.interface_address(interface) if interface else None
    own = own or machine.address_towards(os.environ.get("MASTER_ADDR", _LOOPBACK)) or _LOOPBACK
    return machine.address_among(own, all_gather_object(own, group))
