"""Files of one host that processes on other hosts read by ranges: a checkpoint in memory lies on its ranks' hosts."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from colossus.checkpoint.errors import CheckpointError
from colossus.comm.listener import Address, Listener, dial
from colossus.comm.net import Stream, WireError

#: bytes of one request
RANGE_BYTES = 1 << 22
#: silence after which the other host counts as gone
_SILENCE_SECONDS = 30.0


class FileServer:
    """A server of ranges of the files below a folder.

    Args:
        root: the folder.
        host: address to listen at.
        key: key that a process must know to connect.
    """

    def __init__(self, root: Path, host: str, key: bytes) -> None:
        self._root, self._streams = root, list[Stream]()
        self._listener = Listener(host, key, self._let_in, "the checkpoints in this host's memory")
        self.address: Address = self._listener.address

    def _let_in(self, stream: Stream) -> None:
        self._streams.append(stream)
        stream.start(_Requests(self._root, stream))

    def close(self) -> None:
        self._listener.close()
        for stream in self._streams:
            stream.abort()


class _Requests:
    """The requests of one process: JSON of a file's name below the root, an offset, and a number of bytes."""

    def __init__(self, root: Path, stream: Stream) -> None:
        self._root, self._stream = root, stream

    def allocate(self, head: bytes, size: int) -> Sequence[memoryview]:
        raise WireError("a request has no payload")

    def on_frame(self, head: bytes) -> None:
        name, offset, size = json.loads(head)
        path = self._root / name
        try:
            if not path.resolve().is_relative_to(self._root.resolve()):
                raise PermissionError(f"{name} is not below {self._root}")
            with path.open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), min(size, RANGE_BYTES), offset)
        except OSError as error:
            self._stream.send(f"{path.name}: {error.strerror or error}".encode())
        else:
            self._stream.send(b"", [memoryview(data)])

    def on_end(self, reason: str | None) -> None:
        pass


class RemoteFiles:
    """The files of another host. One thread at a time sends requests.

    Args:
        address: address of its `FileServer`.
        key: key of the server.
        where: name of the host, for messages.

    Raises:
        CheckpointError: if it cannot be reached.
    """

    def __init__(self, address: Address, key: bytes, where: str) -> None:
        self._where, self._lock = where, threading.Lock()
        self._answered = threading.Event()
        self._problem: str | None = None
        self._target, self._count = memoryview(b""), 0
        try:
            self._stream = dial(address, key)
        except (OSError, WireError) as error:
            raise CheckpointError(f"the memory of {where} cannot be reached: {error}") from error
        self._stream.start(self)

    def read(self, name: str, offset: int, target: memoryview) -> int:
        """Fill the beginning of ``target`` from an offset of a file.

        Returns:
            The number of bytes that were read; 0 at the end of the file.

        Raises:
            CheckpointError: if it cannot be read, or the host is gone.
        """
        with self._lock:
            self._answered.clear()
            self._target, self._count = target[:RANGE_BYTES], 0
            if self._problem is None:
                self._stream.send(json.dumps([name, offset, len(self._target)]).encode())
                if not self._answered.wait(_SILENCE_SECONDS):
                    self._problem = f"no answer for {_SILENCE_SECONDS:g} s"
            if self._problem is not None:
                raise CheckpointError(f"{name} in the memory of {self._where}: {self._problem}")
            return self._count

    @property
    def has_failed(self) -> bool:
        """Return whether a file could not be read or the host did not answer; no further request is sent then."""
        return self._problem is not None

    def fetch(self, name: str, path: Path, num_bytes: int) -> None:
        """Copy a file.

        Raises:
            CheckpointError: if it cannot be read.
            OSError: if it cannot be written.
        """
        block = memoryview(bytearray(min(RANGE_BYTES, max(num_bytes, 1))))
        descriptor, offset = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), 0
        try:
            while count := self.read(name, offset, block):
                piece = block[:count]
                while piece:
                    piece = piece[os.write(descriptor, piece) :]
                offset += count
        finally:
            os.close(descriptor)
        if offset != num_bytes:
            raise CheckpointError(f"{name} in the memory of {self._where}: has {offset} bytes, not {num_bytes}")

    def close(self) -> None:
        self._stream.close()

    def abort(self) -> None:
        self._stream.abort()

    # -- called by the thread that reads

    def allocate(self, head: bytes, size: int) -> Sequence[memoryview]:
        if size > len(self._target):
            raise WireError(f"{size} bytes, where {len(self._target)} were asked for")
        self._count = size
        return [self._target[:size]]

    def on_frame(self, head: bytes) -> None:
        if head:
            self._problem = head.decode(errors="replace")
        self._answered.set()

    def on_end(self, reason: str | None) -> None:
        self._problem = self._problem or reason or "it has closed the connection"
        self._answered.set()
