"""One-way messages between two processes of one host, through memory that both have mapped.

The sender copies its tensors into a ring and tells the receiver through a socket; it goes on at once as long as there
is room. The receiver copies them out and answers with one byte, which frees the room.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from colossus.comm.channel import read_exactly

_HEADER = struct.Struct("<QQQQ")  # number of the message, place in the ring, bytes, what it is
_ALIGNMENT = 64
#: messages on their way, at most. A socket's buffer holds some 50 headers or answers (Linux charges about 4 KB for each
#: write, however small), and a receiver must be able to answer without waiting
_MOST_UNREAD = 32


def message_bytes(sizes: Sequence[int]) -> int:
    """Room that tensors of these bytes take side by side."""
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


class Sender:
    """The end that writes.

    Args:
        ring: the memory of this direction.
        peer: a stream to the receiver.
        name: of the receiver, for errors.
    """

    def __init__(self, ring: Tensor, peer: socket.socket, name: str) -> None:
        self._ring, self._peer, self._name = ring, peer, name
        self.capacity = ring.numel()
        self._poll = select.poll()
        self._poll.register(peer, select.POLLIN)
        self._written = self._head = self._used = 0
        #: room of the messages that have not been read, oldest first
        self._unread: deque[int] = deque()

    def send(self, tensors: Sequence[Tensor], what: str, tag: int, await_answer: Callable[[int], bool]) -> None:
        """Copy tensors of together at most ``capacity`` bytes into the ring.

        Args:
            tag: what it is, as the receiver must know it.
            await_answer: called when there is no room; waits until a file descriptor can be read, False when it has
                waited for too long.
        """
        size = message_bytes([tensor.nbytes for tensor in tensors])
        skipped = self._make_room(size, what, await_answer)
        place = at = 0 if skipped else self._head
        for tensor in tensors:
            _view(self._ring, at, tensor.shape, tensor.dtype).copy_(tensor)
            at += message_bytes([tensor.nbytes])
        self._head = at % self.capacity
        self._used += skipped + size
        self._unread.append(skipped + size)
        self._written += 1
        try:
            self._peer.sendall(_HEADER.pack(self._written, place, size, tag))
        except OSError as error:
            raise _gone(self._name, error) from error

    def _make_room(self, size: int, what: str, await_answer: Callable[[int], bool]) -> int:
        """Wait until ``size`` bytes are free in one piece. Returns the bytes at the end of the ring to skip."""
        if len(self._unread) > _MOST_UNREAD // 2 and self._poll.poll(0):
            self._read_answers()
        while True:
            skipped = self.capacity - self._head if self._head + size > self.capacity else 0
            if self._used + skipped + size <= self.capacity and len(self._unread) < _MOST_UNREAD:
                return skipped
            if not await_answer(self._peer.fileno()):
                waited = self._peer.gettimeout()
                raise RuntimeError(f"timeout: {self._name} made no room for the {what} within {waited:.0f} s")
            self._read_answers()

    def _read_answers(self) -> None:
        try:
            answers = self._peer.recv(_MOST_UNREAD)
        except OSError as error:
            raise _gone(self._name, error) from error
        if not answers:
            raise _gone(self._name, "end of stream")
        for _ in answers:
            self._used -= self._unread.popleft()
        if not self._unread:
            self._head = 0

    def close(self) -> None:
        self._peer.close()


class Receiver:
    """The end that reads. Messages come in the order in which they were sent."""

    def __init__(self, ring: Tensor, peer: socket.socket, name: str) -> None:
        self._ring, self._peer, self._name = ring, peer, name
        self.capacity = ring.numel()
        self._read = 0

    def fileno(self) -> int:
        """What can be read when a message has come."""
        return self._peer.fileno()

    def late(self, what: str) -> RuntimeError:
        """The error of a wait that took too long."""
        return RuntimeError(
            f"timeout: {self._name} did not send the {what} within {self._peer.gettimeout() or 0.0:.0f} s"
        )

    def receive(self, into: Sequence[Tensor], what: str, tag: int) -> None:
        """Wait for the next message and copy it into these tensors.

        Raises:
            RuntimeError: when the sender is gone or late, or sent something else.
        """
        try:
            number, at, size, sent = _HEADER.unpack(read_exactly(self._peer, _HEADER.size))
        except TimeoutError as error:
            raise self.late(what) from error
        except OSError as error:
            raise _gone(self._name, error) from error
        self._read += 1
        expected = message_bytes([tensor.nbytes for tensor in into])
        if (number, size) != (self._read, expected):
            raise RuntimeError(
                f"{self._name} sent message {number} of {size} bytes where the {what}, message {self._read} of "
                f"{expected} bytes, is due: the ranks do not run the same program on batches of the same shape"
            )
        if sent != tag:
            raise RuntimeError(
                f"{self._name} sent something else where the {what} is due: the ranks are not at the same step, "
                f"or were given other batches. All ranks of a model must be given the same batch at every step"
            )
        for tensor in into:
            tensor.copy_(_view(self._ring, at, tensor.shape, tensor.dtype))
            at += message_bytes([tensor.nbytes])
        with contextlib.suppress(ConnectionError):  # it may have ended in peace: what it sent is here
            self._peer.sendall(b"\0")

    def close(self) -> None:
        self._peer.close()


def _view(ring: Tensor, at: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return ring[at : at + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def _gone(name: str, why: object) -> RuntimeError:
    return RuntimeError(f"Connection closed by peer: {name} is gone ({why})")
