"""UNIX streams between the ranks of one group on one host.

Each rank listens in a folder of its own that no other user can enter, so the kernel keeps out who does not belong to
the user of the run.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import tempfile
from collections.abc import Iterable, Sequence

from colossus.comm.channel import read_exactly

_INDEX = struct.Struct("<H")
_BACKLOG = 4096
#: a connection takes microseconds
_CONNECT_SECONDS = 5.0


class LocalStreams:
    """The streams of this rank, made in steps; between two of them all ranks must have finished the one before.

    1. Construct: from then on it listens at ``address``.
    2. `connect` to others.
    3. `accept` all who have connected. Nothing is waited for: they are in the queue.

    Args:
        index: of this rank in the group.
        timeout: of the streams, in seconds.

    Attributes:
        address: None when nobody can connect to this rank.
        outgoing, incoming: streams that this rank and others have made, by the index at the other end. They are the
            caller's once all ranks are through.
    """

    def __init__(self, index: int, timeout: float) -> None:
        self.index, self._timeout = index, timeout
        self.outgoing: dict[int, socket.socket] = {}
        self.incoming: dict[int, socket.socket] = {}
        self.address: str | None = None
        self._folder = tempfile.mkdtemp(prefix="colossus-")  # for this user alone
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(OSError):  # the path of the folder is too long, say
            self._listener.bind(f"{self._folder}/{index}")
            self._listener.listen(_BACKLOG)
            self._listener.setblocking(False)
            self.address = f"{self._folder}/{index}"

    def connect(self, addresses: Sequence[str | None], wanted: Iterable[int]) -> bool:
        """Connect to others.

        Args:
            addresses: of all ranks.

        Returns:
            Whether that went well: ranks of other hosts, or of containers with files of their own, are not found.
        """
        try:
            for to in wanted:
                stream = self.outgoing[to] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                stream.settimeout(min(self._timeout, _CONNECT_SECONDS))
                stream.connect(addresses[to] or "")
                stream.sendall(_INDEX.pack(self.index))
                stream.settimeout(self._timeout)
        except OSError:
            return False
        return True

    def accept(self, expected: Iterable[int]) -> bool:
        """Whether those that were to connect have."""
        missing = set(expected)
        try:
            while missing:
                stream, _ = self._listener.accept()
                stream.settimeout(self._timeout)
                (source,) = _INDEX.unpack(read_exactly(stream, _INDEX.size))
                self.incoming[source] = stream
                missing.discard(source)
        except OSError:  # the queue is empty
            pass
        return not missing

    def close(self, *, keeps_streams: bool) -> None:
        """Listen no more.

        Args:
            keeps_streams: those that were made are the caller's now.
        """
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        for stream in () if keeps_streams else (*self.outgoing.values(), *self.incoming.values()):
            stream.close()
