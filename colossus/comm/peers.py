"""Messages between the ranks of one axis that nobody waits for to be sent, and that outlive the death of a rank.

What c10d cannot do: its groups break as a whole when a member dies, and its receives name their sender beforehand.
Messages travel by `colossus.comm.net` while the main thread computes. Tensors on an accelerator are copied to the host
by the caller.
"""

from __future__ import annotations

import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colossus import machine
from colossus.comm import accounting
from colossus.comm.host_staging import BufferPool
from colossus.comm.listener import Listener, dial
from colossus.comm.net import Stream, WireError
from colossus.comm.objects import all_gather_object
from colossus.comm.peer_gone import PeerGone
from colossus.context.groups import AxisGroup

_HEAD = struct.Struct("<Hq")  # kind, number; then what goes beside the data
_INDEX = struct.Struct("<H")
#: how often a rank that waits looks up
_LOOK_SECONDS = 0.2
#: for which a rank that closes waits until what it has sent is with the others
_CLOSE_SECONDS = 10.0


@dataclass(eq=False)
class Message:
    """What a peer has sent.

    Attributes:
        source: its index in the group.
        kind: what it is for.
        number: of a step, or whatever sender and receiver count.
        data: uint8 [bytes], on the host; give it back with `PeerLinks.release` when it is not needed any more.
    """

    source: int
    kind: int
    number: int
    meta: bytes
    data: Tensor


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
        on_arrival: called by a thread of the links when a message has come or a peer is gone; returns at once.

    Raises:
        RuntimeError: a peer cannot be reached.
    """

    def __init__(self, group: AxisGroup, most_bytes: int, timeout_seconds: float, *, pinned: bool = False) -> None:
        self.group, self._timeout, self._most_bytes = group, timeout_seconds, most_bytes
        self.waited_seconds, self.bytes_sent = 0.0, 0
        self.on_arrival: Callable[[], object] = lambda: None
        self._changed = threading.Condition()
        self._inbox: dict[tuple[int, int, int], deque[Message]] = {}
        self._streams: dict[int, Stream] = {}
        #: peers of which nothing can come any more, and why; those that said goodbye are in ``_left``, too
        self._lost: dict[int, str] = {}
        self._left: set[int] = set()
        self._pool = BufferPool(pinned=pinned)
        own = machine.own_address()
        host = machine.address_among(own, all_gather_object(own, group))
        key = secrets.token_bytes(32)
        listener = Listener(host, key, self._take_in, "the links between replicas")
        try:
            self._connect(all_gather_object((listener.address, key), group))
        finally:
            listener.close()

    def _connect(self, offers: Sequence[tuple[tuple[str, int], bytes]]) -> None:
        """To all of smaller index; those of larger index come."""
        me = self.group.index
        for index, (address, key) in enumerate(offers[:me]):
            try:
                self._keep(index, dial(address, key, _INDEX.pack(me), self._timeout))
            except (OSError, WireError) as error:
                raise PeerGone(f"{self.name(me)} cannot reach {self.name(index)}: {error}", index) from error
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._streams) == self.group.size - 1, self._timeout):
                raise PeerGone(f"timeout: some replicas did not connect to {self.name(me)} in {self._timeout:g} s")

    def _take_in(self, stream: Stream) -> None:
        (index,) = _INDEX.unpack(stream.about)
        if index in self._streams or not self.group.index < index < self.group.size:
            raise WireError(f"peer {index} is none that is waited for")
        self._keep(index, stream)

    def _keep(self, index: int, stream: Stream) -> None:
        with self._changed:
            self._streams[index] = stream
            self._changed.notify_all()
        stream.start(_Incoming(self, index, self._most_bytes))

    # -- out ----------------------------------------------------------------------------------------------

    def buffer(self, size: int) -> Tensor:
        """Memory of ``size`` bytes, uint8, on the host: used again after `send(owned=True)` or `release`."""
        return self._pool.take(size)

    def release(self, data: Tensor) -> None:
        """Give back the memory of `buffer` or of a message."""
        self._pool.give_back(data)

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
        targets = [index for index in ([to] if isinstance(to, int) else to) if index not in self._lost]
        size = 0 if data is None else data.numel()
        for counter in accounting.listeners:
            for _ in targets:
                counter.add("send", str(self.group), dtype, size)
        self.bytes_sent += size * len(targets)
        left = len(targets)
        lock = threading.Lock()

        def done() -> None:
            nonlocal left
            with lock:
                left -= 1
                is_last = not left
            if owned and is_last and data is not None:
                self.release(data)

        if owned and not targets and data is not None:
            self.release(data)
        payload = [] if data is None or not size else [memoryview(data.numpy())]  # type: ignore[arg-type]
        for index in targets:
            self._streams[index].send(_HEAD.pack(kind, number) + meta, payload, done)

    # -- in -----------------------------------------------------------------------------------------------

    def receive(
        self, source: int, kind: int, number: int, while_waiting: Callable[[], object] = lambda: None
    ) -> Message:
        """Wait for a message.

        Args:
            while_waiting: called again and again, under the lock of the links.

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
                if (reason := self._lost.get(source)) is not None:
                    raise PeerGone(f"{self.name(source)} has gone: {reason}", source)
                left = began + self._timeout - time.monotonic()
                if left <= 0:
                    raise PeerGone(
                        f"timeout: {self.name(source)} did not send its message {number} within {self._timeout:g} s",
                        source,
                    )
                self._changed.wait(min(left, _LOOK_SECONDS))
                while_waiting()

    def lost(self, source: int) -> str | None:
        """Why nothing can come from a peer any more, None where something can."""
        return self._lost.get(source)

    def has_left(self, source: int) -> bool:
        """Whether a peer has said goodbye."""
        return source in self._left

    def take(self, kind: int) -> list[Message]:
        """All messages of a kind that have come and were not received, without waiting; by source and number."""
        with self._changed:
            found = sorted(key for key in self._inbox if key[1] == kind)
            return [message for key in found for message in self._inbox.pop(key)]

    def has_come(self, kind: int) -> bool:
        """Whether `take` would give any."""
        with self._changed:
            return any(key[1] == kind for key in self._inbox)

    # -- besides ------------------------------------------------------------------------------------------

    def name(self, index: int) -> str:
        return f"rank {self.group.ranks[index]} (replica {index})"

    def close(self) -> None:
        """Wait until all that was sent is with the others, as long as they live, and say goodbye."""
        streams, deadline = tuple(self._streams.values()), time.monotonic() + _CLOSE_SECONDS
        for stream in streams:
            stream.close()
        for stream in streams:
            stream.close(max(0.0, deadline - time.monotonic()))
            stream.abort()

    def put(self, message: Message) -> None:
        """A message has come. By the thread of the streams, as what follows."""
        with self._changed:
            self._inbox.setdefault((message.source, message.kind, message.number), deque()).append(message)
            self._changed.notify_all()
        self.on_arrival()

    def lose(self, source: int, reason: str | None) -> None:
        """Nothing comes from a peer any more: why, or None where it said goodbye."""
        with self._changed:
            self._lost[source] = "it has closed its links" if reason is None else reason
            if reason is None:
                self._left.add(source)
            self._changed.notify_all()
        self.on_arrival()


class _Incoming:
    """What comes from one peer: see `colossus.comm.net.Receiver`."""

    def __init__(self, links: PeerLinks, source: int, most_bytes: int) -> None:
        self._links, self._source, self._most_bytes = links, source, most_bytes
        self._data: Tensor | None = None

    def allocate(self, head: bytes, size: int) -> Sequence[memoryview]:
        if size > self._most_bytes:
            raise WireError(f"a message of {size} bytes, where at most {self._most_bytes} are expected")
        self._data = self._links.buffer(size)
        return [memoryview(self._data.numpy())]  # type: ignore[arg-type]

    def on_frame(self, head: bytes) -> None:
        kind, number = _HEAD.unpack_from(head)
        data, self._data = self._data, None
        data = torch.empty(0, dtype=torch.uint8) if data is None else data
        self._links.put(Message(self._source, kind, number, head[_HEAD.size :], data))

    def on_end(self, reason: str | None) -> None:
        self._links.lose(self._source, reason)
