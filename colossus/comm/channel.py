"""The slots and sockets of one group of processes on one host, and the collectives that run through them."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from colossus.context.groups import AxisGroup

Consume = Callable[[list[Tensor]], Tensor]

_HEADER = struct.Struct("<QQQ")  # sequence number, bytes, dtype

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


class _Operation:
    """One started collective of a channel: a message to and from every peer says that its slot is filled."""

    def __init__(self, channel: Channel, header: tuple[int, int, int], turn: int) -> None:
        self._channel, self._header, self._turn = channel, header, turn
        self._unread = dict(channel.peers)

    def show(self, x: Tensor) -> None:
        """Fill the own slot and tell everybody."""
        self.view(self._channel.me, x.shape).copy_(x.detach())
        for rank in self._channel.peers:
            self.send(rank)

    def send(self, rank: int) -> None:
        """Tell a peer that what it is to read is there."""
        with self._channel.naming(rank):
            self._channel.peers[rank].sendall(_HEADER.pack(*self._header))

    def await_rank(self, rank: int) -> None:
        """Wait until a peer's slot is filled, and check that it runs the same collective."""
        peer = self._unread.pop(rank, None)
        if peer is None:
            return
        with self._channel.naming(rank):
            theirs = _HEADER.unpack(read_exactly(peer, _HEADER.size))
        if theirs != self._header:
            raise RuntimeError(self._channel.mismatch(rank, self._header, theirs))

    def await_all(self) -> None:
        for rank in list(self._unread):
            self.await_rank(rank)

    def view(self, rank: int, shape: torch.Size) -> Tensor:
        """A rank's slot as a tensor."""
        _, size, dtype = self._header
        return self._channel.slots[rank][self._turn][:size].view(DTYPES[dtype]).view(shape)

    def finish(self) -> None:
        """Another collective begins: nothing of the slots may be needed after this."""
        raise NotImplementedError

    def close(self) -> None:
        """All has been read."""
        self.await_all()
        self._channel.is_done(self)


class _Whole(_Operation):
    """All parts are consumed at once."""

    def __init__(self, channel: Channel, header: tuple[int, int, int], turn: int, x: Tensor, consume: Consume) -> None:
        super().__init__(channel, header, turn)
        self._shape, self._consume = x.shape, consume
        self._result: Tensor | None = None
        self.show(x)

    def finish(self) -> None:
        if self._result is None:
            self.await_all()
            self._result = self._consume([self.view(rank, self._shape) for rank in range(self._channel.size)])
            self._channel.is_done(self)

    def wait(self) -> Tensor:
        self.finish()
        assert self._result is not None
        return self._result


class Parts(_Operation):
    """The tensors of all ranks, read one by one where they are: valid until `close`."""

    def __init__(self, channel: Channel, header: tuple[int, int, int], turn: int, x: Tensor) -> None:
        super().__init__(channel, header, turn)
        self._shape = x.shape
        self._copies: list[Tensor] | None = None
        self.show(x)

    def part(self, rank: int) -> Tensor:
        if self._copies is not None:
            return self._copies[rank]
        self.await_rank(rank)
        return self.view(rank, self._shape)

    def finish(self) -> None:  # another collective begins: keep what may still be asked for
        self.await_all()
        self._copies = [self.view(rank, self._shape).clone() for rank in range(self._channel.size)]
        self._channel.is_done(self)


class Exchange(_Operation):
    """A part for every rank, written in place one by one; then the parts that the others wrote for this rank."""

    def __init__(self, channel: Channel, header: tuple[int, int, int], turn: int, shape: torch.Size) -> None:
        super().__init__(channel, header, turn)
        self._shape = torch.Size((channel.size, *shape))

    def place(self, rank: int) -> Tensor:
        """Where to write the part for a rank, before `send`."""
        return self.view(self._channel.me, self._shape)[rank]

    def received(self, rank: int) -> Tensor:
        """What a rank wrote for this one; valid until `close`."""
        self.await_rank(rank)
        return self.view(rank, self._shape)[self._channel.me]

    def finish(self) -> None:
        raise RuntimeError("another collective began before this exchange was closed")


class Channel:
    """The mapped slots and the sockets of one group.

    Every rank has two slots, used in turn. At most one collective is open: starting the next one finishes it first, so
    a peer's message about collective k + 1 says that it has read all of collective k, whose slots are free again.
    """

    def __init__(self, group: AxisGroup, slots: list[list[Tensor]], peers: dict[int, socket.socket]) -> None:
        self.me, self.size, self._ranks = group.index, group.size, group.ranks
        self.peers = peers
        self.slots = slots
        self.slot_bytes = slots[0][0].numel()
        self._sequence = 0
        self._open: _Operation | None = None

    def start(self, x: Tensor, consume: Consume) -> Callable[[], Tensor]:
        """Show ``x`` to the group; the function returned waits for the others and gives ``consume`` of all parts.

        Args:
            x: at most ``slot_bytes``; the same shape and dtype on every rank.
            consume: takes the parts of all ranks in group order, which are valid only during the call.
        """
        operation = _Whole(self, *self._next(x.nbytes, x.dtype), x, consume)
        self._open = operation
        return operation.wait

    def share(self, x: Tensor) -> Parts:
        """Show ``x`` to the group, and read the parts of the others one by one."""
        self._open = parts = Parts(self, *self._next(x.nbytes, x.dtype), x)
        return parts

    def exchange(self, shape: torch.Size, dtype: torch.dtype) -> Exchange:
        """Write a part of ``shape`` for every rank, and read theirs. All parts together: at most ``slot_bytes``."""
        size = self.size * math.prod(shape) * dtype.itemsize
        self._open = exchange = Exchange(self, *self._next(size, dtype), shape)
        return exchange

    def _next(self, size: int, dtype: torch.dtype) -> tuple[tuple[int, int, int], int]:
        """Finish what is open; header and turn of the next collective."""
        if self._open is not None:
            self._open.finish()
        self._sequence += 1
        return (self._sequence, size, DTYPES.index(dtype)), self._sequence & 1

    def is_done(self, operation: _Operation) -> None:
        if self._open is operation:
            self._open = None

    def mismatch(self, rank: int, mine: tuple[int, int, int], theirs: tuple[int, int, int]) -> str:
        return (
            f"rank {self._ranks[self.me]} runs collective #{mine[0]} of its group with {mine[1]} bytes of "
            f"{DTYPES[mine[2]]}, rank {self._ranks[rank]} runs #{theirs[0]} with {theirs[1]} bytes of "
            f"{DTYPES[theirs[2]]}: the ranks do not run the same program"
        )

    @contextlib.contextmanager
    def naming(self, rank: int) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise RuntimeError(
                f"timeout: rank {self._ranks[rank]} did not come to collective #{self._sequence} within "
                f"{self.peers[rank].gettimeout():.0f} s"
            ) from error
        except OSError as error:
            raise RuntimeError(f"Connection closed by peer: rank {self._ranks[rank]} is gone ({error})") from error

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()


def read_exactly(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = peer.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("end of stream")
        data += piece
    return data
