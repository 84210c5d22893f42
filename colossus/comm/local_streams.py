"""UNIX streams between the ranks of one group on one host. Each end proves to the other that it belongs to the group.

An abstract socket has no permissions: any process of the host can connect to it. So both ends ask the kernel for the
other's user, and both show that they know the key of the group, which went through its process group, before a stream
is used.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import warnings
from collections.abc import Iterable, Sequence

from colossus.comm.channel import read_exactly

#: what a stream is for, and the index at its other end
Key = tuple[int, int]

#: to hand over a file descriptor, and to stay
HANDOVER, LINK = 0, 1

_HELLO = struct.Struct("<BHH32s")  # purpose, who connects, to whom, proof
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_BACKLOG = 4096
#: a connection takes microseconds; where it takes longer, somebody has filled the queue
_CONNECT_SECONDS = 5.0


class LocalStreams:
    """The streams of this rank, made in steps; between two of them all ranks must have finished the one before.

    1. Construct: from then on it listens at ``address``.
    2. `connect` to others.
    3. `accept` all who have connected. Nothing is waited for: they are in the queue.
    4. `confirm` that those connected to have accepted.

    Each step returns whether it went well. Whoever connects without being of the group is dropped with a warning.

    Args:
        index: of this rank in the group.
        timeout: of the streams, in seconds.

    Attributes:
        address: None when nobody can connect to this rank.
        connected, accepted: the streams, by purpose and index of the other end.
    """

    def __init__(self, index: int, timeout: float) -> None:
        self.index, self._timeout = index, timeout
        self.connected: dict[Key, socket.socket] = {}
        self.accepted: dict[Key, socket.socket] = {}
        self.address: str | None = f"\0colossus-{os.getpid()}-{secrets.token_hex(8)}"
        self._key = b""
        self._listener: socket.socket | None = None
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(self.address)
            self._listener.listen(_BACKLOG)
            self._listener.setblocking(False)
        except OSError:
            self.address = None

    def connect(self, addresses: Sequence[str | None], key: bytes, wanted: Iterable[Key]) -> bool:
        """Connect to others.

        Args:
            addresses: of all ranks.
            key: known to the ranks of the group alone.
        """
        self._key = key
        try:
            for purpose, to in wanted:
                stream = self.connected[purpose, to] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                stream.settimeout(min(self._timeout, _CONNECT_SECONDS))
                address = addresses[to]
                if address is None:
                    return False
                stream.connect(address)
                if is_stranger(stream):
                    _warn(stream, f"listens at the address of rank {to} of the group")
                    return False
                stream.sendall(_HELLO.pack(purpose, self.index, to, self._proof(b"hello", purpose, self.index, to)))
                stream.settimeout(self._timeout)
        except OSError:  # in another network namespace, on another host
            return False
        return True

    def accept(self, expected: Iterable[Key], descriptor: int | None = None) -> bool:
        """Accept those who have connected, and close the listener.

        Args:
            expected: the streams that others make to this rank.
            descriptor: of a file, handed over where that is what a stream is for.
        """
        missing = set(expected)
        assert self._listener is not None
        try:
            while True:
                stream, _ = self._listener.accept()
                caller = self._read_hello(stream)
                if caller is None or caller not in missing:
                    _warn(stream, "connected to a group of ranks it does not belong to")
                    stream.close()
                    continue
                missing.discard(caller)
                self.accepted[caller] = stream
                stream.settimeout(self._timeout)
                answer = self._proof(b"answer", caller[0], caller[1], self.index)
                if caller[0] == HANDOVER and descriptor is not None:
                    socket.send_fds(stream, [answer], [descriptor])
                else:
                    stream.sendall(answer)
        except BlockingIOError:  # the queue is empty
            return not missing
        except OSError:
            return False
        finally:
            self._listener.close()

    def confirm(self) -> tuple[bool, int | None]:
        """Whether all have answered rightly, and the descriptor that came with an answer."""
        descriptor = None
        try:
            for (purpose, to), stream in self.connected.items():
                wanted = self._proof(b"answer", purpose, self.index, to)
                if purpose == HANDOVER:
                    answer, descriptors, _, _ = socket.recv_fds(stream, len(wanted), 1)
                    descriptor = descriptors[0] if descriptors else None
                else:
                    answer = read_exactly(stream, len(wanted))
                if not hmac.compare_digest(answer, wanted):
                    _warn(stream, f"answered in the place of rank {to} of the group")
                    return False, descriptor
        except OSError:
            return False, descriptor
        return True, descriptor

    def links(self) -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
        """The streams that stay: to those connected to, and from those accepted. They are the caller's from now on."""
        return _take_links(self.connected), _take_links(self.accepted)

    def close(self) -> None:
        """Close the listener, and the streams that nobody has taken."""
        if self._listener is not None:
            self._listener.close()
        for stream in (*self.connected.values(), *self.accepted.values()):
            stream.close()

    def _read_hello(self, stream: socket.socket) -> Key | None:
        if is_stranger(stream):
            return None
        hello = b""
        with contextlib.suppress(OSError):
            hello = stream.recv(_HELLO.size, socket.MSG_DONTWAIT)  # sent before the ranks agreed to go on
        if len(hello) != _HELLO.size:
            return None
        purpose, caller, to, proof = _HELLO.unpack(hello)
        right = hmac.compare_digest(proof, self._proof(b"hello", purpose, caller, to))
        return (purpose, caller) if right and to == self.index else None

    def _proof(self, word: bytes, purpose: int, caller: int, to: int) -> bytes:
        return hmac.digest(self._key, b"%s %d %d %d" % (word, purpose, caller, to), "sha256")


def _take_links(streams: dict[Key, socket.socket]) -> dict[int, socket.socket]:
    return {index: streams.pop((purpose, index)) for purpose, index in sorted(streams) if purpose == LINK}


def _credentials(stream: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them."""
    packed = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(packed)
    return process, user


def is_stranger(stream: socket.socket) -> bool:
    """Whether another user is at the other end. Linux only."""
    return _credentials(stream)[1] != os.geteuid()


def _warn(stream: socket.socket, what: str) -> None:
    process, user = _credentials(stream)
    warnings.warn(
        f"process {process} of user {user} {what}: it was dropped. Either somebody on this host tries to take part in "
        f"the run, or the ranks run as different users",
        RuntimeWarning,
        stacklevel=2,
    )
