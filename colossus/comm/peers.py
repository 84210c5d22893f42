"""Asynchronous messages between the ranks of one axis, which go on when a rank dies.

c10d cannot do this: a group of it breaks as a whole when a member dies, and its receives name their sender. Here
messages travel by `colossus.comm.messages` while the main thread computes. The caller copies tensors of an accelerator
to the host.
"""

from __future__ import annotations

import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from colossus import machine
from colossus.comm import accounting
from colossus.comm.flat_buffer import FlatBuffer
from colossus.comm.host_staging import BufferPool
from colossus.comm.listener import Listener, dial
from colossus.comm.messages import Messages, head_of
from colossus.comm.net import Stream, WireError
from colossus.comm.objects import all_gather_object
from colossus.comm.peer_gone import PeerGone
from colossus.comm.step_regions import over, timed
from colossus.context.groups import AxisGroup

_INDEX = struct.Struct("<H")
#: the interval at which a waiting rank calls ``while_waiting``
_LOOK_SECONDS = 0.2
#: the longest that `PeerLinks.close` waits until the peers have read all messages
_CLOSE_SECONDS = 10.0


@dataclass(eq=False)
class Message:
    """A message of a peer.

    Attributes:
        source: the sender's index in the group.
        kind: the purpose of the message, a number of the caller's.
        number: the step, or whatever sender and receiver count.
        meta: a value of JSON beside the data.
        data: uint8 [bytes], on the host; give it back with `PeerLinks.release` when it is not needed any more.
    """

    source: int
    kind: int
    number: int
    meta: Any
    data: Tensor


class PeerLinks:
    """The links of this rank to all others of its group. All ranks of the group make theirs at the same time.

    Args:
        group: the ranks of an axis; peers are named by their index in it.
        max_bytes: the most bytes of a message's data; a message that claims more ends its stream.
        timeout_seconds: the longest silence of a peer that this rank waits for.
        pinned: memory is page-locked, for copies to and from an accelerator.

    Attributes:
        waited_seconds: the time that `receive` has waited so far.
        bytes_sent: the bytes that `send` has sent so far.
        on_arrival: called by a thread of the links when a message has come or a peer is gone; must return at once.

    Raises:
        PeerGone: a peer cannot be reached.
    """

    def __init__(self, group: AxisGroup, max_bytes: int, timeout_seconds: float, *, pinned: bool = False) -> None:
        self.group, self._timeout, self._max_bytes = group, timeout_seconds, max_bytes
        self.waited_seconds, self.bytes_sent = 0.0, 0
        self.on_arrival: Callable[[], object] = lambda: None
        self._changed = threading.Condition()
        self._inbox: dict[tuple[int, int, int], deque[Message]] = {}
        self._streams: dict[int, Stream] = {}
        #: peers that can send nothing any more, and why; those that said goodbye are in ``_departed``, too
        self._lost: dict[int, str] = {}
        self._departed: set[int] = set()
        self._pool = BufferPool(pinned=pinned)
        own = machine.own_address()
        host = machine.address_among(own, all_gather_object(own, group))
        key = secrets.token_bytes(32)
        listener = Listener(host, key, self._accept, "the links between replicas")
        try:
            self._connect(all_gather_object((listener.address, key), group))
        finally:
            listener.close()

    def _connect(self, offers: Sequence[tuple[tuple[str, int], bytes]]) -> None:
        """Dial all peers of smaller index, and wait until those of larger index have dialed this one."""
        me = self.group.index
        for index, (address, key) in enumerate(offers[:me]):
            try:
                self._start(index, dial(address, key, _INDEX.pack(me), self._timeout))
            except (OSError, WireError) as error:
                raise PeerGone(f"{self.name(me)} cannot reach {self.name(index)}: {error}", index) from error
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._streams) == self.group.size - 1, self._timeout):
                raise PeerGone(f"timeout: some replicas did not connect to {self.name(me)} in {self._timeout:g} s")

    def _accept(self, stream: Stream) -> None:
        (index,) = _INDEX.unpack(stream.about)
        if index in self._streams or not self.group.index < index < self.group.size:
            raise WireError(f"it says that it is peer {index}, which is connected already or is not to dial this rank")
        self._start(index, stream)

    def _start(self, index: int, stream: Stream) -> None:
        with self._changed:
            self._streams[index] = stream
            self._changed.notify_all()
        take, end = partial(self._take, index), partial(self._lose, index)
        stream.start(Messages(self._pool, take, end, max_bytes=self._max_bytes))

    # -- out ----------------------------------------------------------------------------------------------

    def buffer(self, size: int) -> Tensor:
        """Return memory of ``size`` bytes, uint8, on the host; it is reused after `send(owned=True)` or `release`."""
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
        meta: Any = None,
        *,
        dtype: torch.dtype = torch.uint8,
        owned: bool = False,
    ) -> None:
        """Start to send a message to one or several peers, and return at once. Peers that are gone are skipped.

        Args:
            to: index of the peer, or a list of them.
            kind: the purpose of the message.
            number: the step, or whatever sender and receiver count.
            data: uint8, contiguous, on the host; must not be changed any more.
            meta: a value of JSON beside the data.
            dtype: the dtype under which the bytes are counted.
            owned: ``data`` came from `buffer`, and goes back there once it has been sent.
        """
        targets = [index for index in ([to] if isinstance(to, int) else to) if index not in self._lost]
        size = 0 if data is None else data.numel()
        for counter in accounting.listeners:
            for _ in targets:
                counter.add("send", str(self.group), dtype, size)
        self.bytes_sent += size * len(targets)
        num_unsent = len(targets)
        lock = threading.Lock()

        def done() -> None:
            nonlocal num_unsent
            with lock:
                num_unsent -= 1
                is_last = not num_unsent
            if owned and is_last and data is not None:
                self.release(data)

        if owned and not targets and data is not None:
            self.release(data)
        arrays = [] if data is None else [data]
        head, payload = head_of({"k": kind, "n": number, "m": meta}, arrays), FlatBuffer.of(arrays).memory_of(arrays)
        for index in targets:
            self._streams[index].send(head, payload, done)

    # -- in -----------------------------------------------------------------------------------------------

    @timed(lambda links, *_, **__: ("wait for a replica", over(str(links.group))))
    def receive(
        self, source: int, kind: int, number: int, while_waiting: Callable[[], object] = lambda: None
    ) -> Message:
        """Wait for a message, and return it.

        Args:
            source: index of its sender.
            kind: its purpose.
            number: the step, or whatever sender and receiver count.
            while_waiting: called again and again, under the lock of the links.

        Raises:
            PeerGone: the sender died or closed its links before it sent the message, or was silent for too long.
        """
        key, began = (source, kind, number), time.monotonic()
        with self._changed:
            while True:
                messages = self._inbox.get(key)
                if messages:
                    message = messages.popleft()
                    if not messages:
                        del self._inbox[key]
                    self.waited_seconds += time.monotonic() - began
                    return message
                if (reason := self._lost.get(source)) is not None:
                    raise PeerGone(f"{self.name(source)} has gone: {reason}", source)
                remaining = began + self._timeout - time.monotonic()
                if remaining <= 0:
                    raise PeerGone(
                        f"timeout: {self.name(source)} did not send its message {number} within {self._timeout:g} s",
                        source,
                    )
                self._changed.wait(min(remaining, _LOOK_SECONDS))
                while_waiting()

    def lost(self, source: int) -> str | None:
        """Return why a peer can send nothing any more, or None where it can."""
        return self._lost.get(source)

    def has_departed(self, source: int) -> bool:
        """Return whether a peer has said goodbye."""
        return source in self._departed

    def take(self, kind: int) -> list[Message]:
        """Return all messages of a kind that have come and were not received, by source and number. Does not wait."""
        with self._changed:
            keys = sorted(key for key in self._inbox if key[1] == kind)
            return [message for key in keys for message in self._inbox.pop(key)]

    def has_come(self, kind: int) -> bool:
        """Return whether `take` would return any message of this kind."""
        with self._changed:
            return any(key[1] == kind for key in self._inbox)

    # -- besides ------------------------------------------------------------------------------------------

    def name(self, index: int) -> str:
        return f"rank {self.group.ranks[index]} (replica {index})"

    def close(self) -> None:
        """Say goodbye, and wait until the peers that live have read all messages, `_CLOSE_SECONDS` at most."""
        streams, deadline = tuple(self._streams.values()), time.monotonic() + _CLOSE_SECONDS
        for stream in streams:
            stream.close()
        for stream in streams:
            stream.close(max(0.0, deadline - time.monotonic()))
            stream.abort()

    # -- called by the thread of the streams ------------------------------------------------------------------

    def _take(self, source: int, head: dict[str, Any], arrays: list[Tensor], buffer: Tensor | None) -> None:
        data = arrays[0] if arrays else torch.empty(0, dtype=torch.uint8)
        key = source, head["k"], head["n"]
        with self._changed:
            self._inbox.setdefault(key, deque()).append(Message(*key, head["m"], data))
            self._changed.notify_all()
        self.on_arrival()

    def _lose(self, source: int, reason: str | None) -> None:
        """Record that a peer sends nothing any more: the reason, or None where it said goodbye."""
        with self._changed:
            self._lost[source] = "it has closed its links" if reason is None else reason
            if reason is None:
                self._departed.add(source)
            self._changed.notify_all()
        self.on_arrival()
