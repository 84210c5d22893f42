"""One-way messages between two processes of one host, through memory that both have mapped.

The sender copies its tensors into a ring buffer and sends a header through a socket. It goes on at once while the
buffer has room. The receiver copies the tensors out and answers with one byte, which frees their room.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from colossus.comm.channel import read_exactly
from colossus.comm.flat_buffer import FlatBuffer
from colossus.comm.peer_gone import PeerGone

_HEADER = struct.Struct("<QQQQ")  # number of the message, offset in the buffer, bytes, tag
#: the most messages that are sent and not answered. A socket's buffer holds some 50 headers or answers (Linux charges
#: about 4 KB for each write, however small), and a receiver must be able to answer without waiting
_MAX_UNREAD = 32


class Sender:
    """The end that writes.

    Args:
        buffer: the memory of this direction, used as a ring buffer.
        peer: a stream to the receiver.
        name: the receiver's name in errors.
    """

    def __init__(self, buffer: Tensor, peer: socket.socket, name: str) -> None:
        self._buffer, self._peer, self._name = buffer, peer, name
        self.capacity = buffer.numel()
        self._written = self._head = self._used = 0
        #: room of the messages that have not been read, oldest first
        self._unread: deque[int] = deque()

    def send(self, tensors: Sequence[Tensor], label: str, tag: int, await_answer: Callable[[int], bool]) -> None:
        """Copy tensors of at most ``capacity`` bytes in all into the buffer, and notify the receiver.

        Args:
            tensors: the message.
            label: the message's name in errors.
            tag: a number that the receiver compares with its own.
            await_answer: called when there is no room; waits until a file descriptor is readable, and returns False
                when that took too long.
        """
        flat = FlatBuffer.of(tensors)
        size = flat.nbytes
        skipped = self._make_room(size, label, await_answer)
        start = 0 if skipped else self._head
        for view, tensor in zip(flat.views(self._buffer[start:]), tensors, strict=True):
            view.copy_(tensor)
        self._head = (start + size) % self.capacity
        self._used += skipped + size
        self._unread.append(skipped + size)
        self._written += 1
        try:
            self._peer.sendall(_HEADER.pack(self._written, start, size, tag))
        except OSError as error:
            raise _closed_error(self._name, error) from error

    def _make_room(self, size: int, label: str, await_answer: Callable[[int], bool]) -> int:
        """Wait until ``size`` contiguous bytes are free, and return how many to skip at the end of the buffer."""
        while True:
            skipped = self.capacity - self._head if self._head + size > self.capacity else 0
            if self._used + skipped + size <= self.capacity and len(self._unread) < _MAX_UNREAD:
                return skipped
            if not await_answer(self._peer.fileno()):
                waited = self._peer.gettimeout()
                raise PeerGone(f"timeout: {self._name} made no room for the {label} within {waited:.0f} s")
            self._read_answers()

    def _read_answers(self) -> None:
        try:
            answers = self._peer.recv(_MAX_UNREAD)
        except OSError as error:
            raise _closed_error(self._name, error) from error
        if not answers:
            raise _closed_error(self._name, "end of stream")
        for _ in answers:
            self._used -= self._unread.popleft()
        if not self._unread:
            self._head = 0

    def close(self) -> None:
        self._peer.close()


class Receiver:
    """The end that reads. Messages come in the order in which they were sent."""

    def __init__(self, buffer: Tensor, peer: socket.socket, name: str) -> None:
        self._buffer, self._peer, self._name = buffer, peer, name
        self.capacity = buffer.numel()
        self._read = 0

    def fileno(self) -> int:
        """Return the descriptor that is readable when a message has come."""
        return self._peer.fileno()

    def timeout_error(self, label: str) -> PeerGone:
        """Return the error of a wait that took too long."""
        return PeerGone(f"timeout: {self._name} did not send the {label} within {self._peer.gettimeout() or 0.0:.0f} s")

    def receive(self, into: Sequence[Tensor], label: str, tag: int) -> None:
        """Wait for the next message and copy it into these tensors.

        Raises:
            PeerGone: the sender is gone or timed out.
            RuntimeError: the sender sent another message.
        """
        try:
            number, at, size, sent = _HEADER.unpack(read_exactly(self._peer, _HEADER.size))
        except TimeoutError as error:
            raise self.timeout_error(label) from error
        except OSError as error:
            raise _closed_error(self._name, error) from error
        self._read += 1
        flat = FlatBuffer.of(into)
        expected = flat.nbytes
        if (number, size, sent) != (self._read, expected, tag):
            raise RuntimeError(
                f"{self._name} sent something else ({size} bytes) where the {label} ({expected} bytes) is due: the "
                f"ranks are not at the same step, or were given other batches. All ranks of a model must be given the "
                f"same batch at every step"
            )
        for view, tensor in zip(flat.views(self._buffer[at:]), into, strict=True):
            tensor.copy_(view)
        with contextlib.suppress(ConnectionError):  # the sender may have ended normally: its message is here
            self._peer.sendall(b"\0")

    def close(self) -> None:
        self._peer.close()


def _closed_error(name: str, reason: object) -> PeerGone:
    return PeerGone(f"Connection closed by peer: {name} is gone ({reason})")
