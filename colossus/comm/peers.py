"""Messages between the ranks of one axis that nobody waits for to be sent, and that outlive the death of a rank.

What c10d cannot do: its groups break as a whole when a member dies, and its receives name their sender beforehand. Each
rank has one thread that reads and writes all connections, so that messages travel while the main thread computes.
Tensors on an accelerator are copied to the host by the caller.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from colossus import machine
from colossus.comm import accounting
from colossus.comm.buffer_pool import BufferPool
from colossus.comm.objects import all_gather_object
from colossus.comm.peer_connections import PeerConnections
from colossus.comm.peer_reader import Message
from colossus.comm.peer_wire import Header
from colossus.context.groups import AxisGroup

#: how often a rank that waits looks up
_LOOK_SECONDS = 1.0


class PeerGone(RuntimeError):
    """A peer has died: its connection was closed without a farewell.

    Attributes:
        index: of the peer in the group.
    """

    def __init__(self, index: int, text: str) -> None:
        super().__init__(text)
        self.index = index


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
        # of a copy: its indices are those of all, also when some of them have died
        self.group, self._timeout = replace(group), timeout_seconds
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
        self._pool = BufferPool(pinned=pinned)
        self._closed = False
        self._failure: BaseException | None = None
        self._connections = PeerConnections(_own_address(group), group.index, group.size, most_bytes, self)
        offers = all_gather_object((self._connections.address, secrets.token_bytes(32)), group)
        self._connections.start([address for address, _ in offers], offers[0][1])

    # -- for the main thread ------------------------------------------------------------------------------

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
        for index in targets:
            self._connections.send(index, header, view, done)

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

    def has_left(self, source: int) -> bool:
        """Whether a peer has said goodbye."""
        return source in self._left and source not in self._gone

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
        self.on_death(index, reason)
        self._connections.drop(index)

    @property
    def gone(self) -> dict[int, str]:
        """Peers that died, and what was seen of it."""
        return dict(self._gone)

    def backlog(self, to: int) -> int:
        """Bytes that wait to be sent to a peer."""
        return self._connections.backlog(to)

    def name(self, index: int) -> str:
        return f"rank {self.group.ranks[index]} (replica {index})"

    def close(self) -> None:
        """Wait until all that was sent is with the others, as long as they live, and say goodbye."""
        if self._closed:
            return
        self._closed = True
        self._connections.close()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the thread of the links between replicas failed: {self._failure}") from self._failure

    # -- told by the thread of the connections --------------------------------------------------------------

    def on_message(self, message: Message) -> None:
        with self._changed:
            self._inbox.setdefault((message.source, message.kind, message.number), deque()).append(message)
            self._changed.notify_all()
        self.on_arrival()

    def on_connection(self, source: int) -> None:
        self._heard.add(source)

    def on_farewell(self, source: int) -> None:
        with self._changed:
            self._left.add(source)
            self._changed.notify_all()

    def on_death(self, source: int, reason: str) -> None:
        with self._changed:
            self._gone.setdefault(source, reason)
            self._changed.notify_all()
        self.on_arrival()

    def on_deaf(self, target: int, reason: str) -> None:
        with self._changed:
            self._deaf[target] = reason, time.monotonic()
            self._changed.notify_all()

    def on_failure(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()


def _own_address(group: AxisGroup) -> str:
    """The address of this host at which the other ranks reach it. Collective."""
    own = machine.own_address()
    return machine.address_among(own, all_gather_object(own, group))
