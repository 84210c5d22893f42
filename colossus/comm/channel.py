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
from colossus.error_place import located_error

Consume = Callable[[list[Tensor]], Tensor]
Fill = Callable[[Tensor], object]

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
    """A collective that was started on a channel. One message to and from every peer says that its slot is filled."""

    def __init__(self, channel: Channel, header: tuple[int, int, int], turn: int) -> None:
        self._channel, self._header, self._turn = channel, header, turn
        self._unread = dict(channel.peers)

    def publish(self, shape: torch.Size, fill: Fill) -> None:
        """Fill this rank's slot, as a tensor of this shape, and notify all peers."""
        fill(self.view(self._channel.index, shape))
        for rank in self._channel.peers:
            self.notify(rank)

    def notify(self, rank: int) -> None:
        """Say to a peer that it can read what it needs of this rank's slot."""
        with self._channel.errors_naming(rank):
            self._channel.peers[rank].sendall(_HEADER.pack(*self._header))

    def await_rank(self, rank: int) -> None:
        """Wait until a peer's slot is filled, and check that it runs the same collective."""
        peer = self._unread.pop(rank, None)
        if peer is None:
            return
        with self._channel.errors_naming(rank):
            theirs = _HEADER.unpack(read_exactly(peer, _HEADER.size))
        if theirs != self._header:
            raise located_error(self._channel.mismatch(rank, self._header, theirs), RuntimeError)

    def await_all(self) -> None:
        for rank in list(self._unread):
            self.await_rank(rank)

    def view(self, rank: int, shape: torch.Size) -> Tensor:
        """A rank's slot as a tensor."""
        _, size, dtype = self._header
        return self._channel.slots[rank][self._turn][:size].view(DTYPES[dtype]).view(shape)

    def finish(self) -> None:
        """Called before the next collective starts: nothing of the slots may be needed after this."""
        raise NotImplementedError

    def close(self) -> None:
        """All has been read."""
        self.await_all()
        self._channel.release(self)


class _Collective(_Operation):
    """One function consumes the tensors of all ranks at once."""

    def __init__(
        self,
        channel: Channel,
        header: tuple[int, int, int],
        turn: int,
        shape: torch.Size,
        fill: Fill,
        consume: Consume,
    ) -> None:
        super().__init__(channel, header, turn)
        self._shape, self._consume = shape, consume
        self._result: Tensor | None = None
        self.publish(shape, fill)

    def finish(self) -> None:
        if self._result is None:
            self.await_all()
            self._result = self._consume([self.view(rank, self._shape) for rank in range(self._channel.size)])
            self._channel.release(self)

    def wait(self) -> Tensor:
        self.finish()
        assert self._result is not None
        return self._result


class Gathering(_Operation):
    """An all-gather whose shards are read one by one where they lie; they are valid until `close`."""

    def __init__(self, channel: Channel, header: tuple[int, int, int], turn: int, x: Tensor) -> None:
        super().__init__(channel, header, turn)
        self._shape = x.shape
        self._copies: list[Tensor] | None = None
        self.publish(x.shape, lambda slot: slot.copy_(x.detach()))

    def shard(self, rank: int) -> Tensor:
        if self._copies is not None:
            return self._copies[rank]
        self.await_rank(rank)
        return self.view(rank, self._shape)

    def finish(self) -> None:  # another collective starts: keep what may still be asked for
        self.await_all()
        self._copies = [self.view(rank, self._shape).clone() for rank in range(self._channel.size)]
        self._channel.release(self)


class Scattering(_Operation):
    """An all-to-all: one chunk for every rank is written in place, then the chunks written for this rank are read."""

    def __init__(self, channel: Channel, header: tuple[int, int, int], turn: int, shape: torch.Size) -> None:
        super().__init__(channel, header, turn)
        self._shape = torch.Size((channel.size, *shape))

    def outgoing(self, rank: int) -> Tensor:
        """Where to write the chunk for a rank, before `notify`."""
        return self.view(self._channel.index, self._shape)[rank]

    def received(self, rank: int) -> Tensor:
        """The chunk that a rank wrote for this one; valid until `close`."""
        self.await_rank(rank)
        return self.view(rank, self._shape)[self._channel.index]

    def finish(self) -> None:
        raise RuntimeError("another collective began before this exchange was closed")


class Channel:
    """The mapped slots and the sockets of one group.

    Every rank has two slots, used in turn. At most one collective is open: starting the next one finishes it first, so
    a peer's message about collective k + 1 says that it has read all of collective k, whose slots are free again.
    """

    def __init__(self, group: AxisGroup, slots: list[list[Tensor]], peers: dict[int, socket.socket]) -> None:
        self.index, self.size, self._ranks = group.index, group.size, group.ranks
        self.peers = peers
        self.slots = slots
        self.slot_bytes = slots[0][0].numel()
        self._sequence = 0
        self._open: _Operation | None = None

    def start(self, x: Tensor, consume: Consume) -> Callable[[], Tensor]:
        """Share ``x`` with the group; the function returned waits for the others and gives ``consume`` of all tensors.

        Args:
            x: at most ``slot_bytes``; the same shape and dtype on every rank.
            consume: takes the tensors of all ranks in group order, which are valid only during the call.
        """
        return self.start_filled(x.shape, x.dtype, lambda slot: slot.copy_(x.detach()), consume)

    def start_filled(self, shape: torch.Size, dtype: torch.dtype, fill: Fill, consume: Consume) -> Callable[[], Tensor]:
        """`start` of a tensor that exists nowhere else: ``fill`` writes it to this rank's slot."""
        size = math.prod(shape) * dtype.itemsize
        operation = _Collective(self, *self._next(size, dtype), shape, fill, consume)
        self._open = operation
        return operation.wait

    def gather(self, x: Tensor) -> Gathering:
        """Share ``x`` with the group, and read the tensors of the others one by one."""
        self._open = gathering = Gathering(self, *self._next(x.nbytes, x.dtype), x)
        return gathering

    def scatter(self, shape: torch.Size, dtype: torch.dtype) -> Scattering:
        """Write a chunk of ``shape`` for every rank, and read theirs. All chunks together: at most ``slot_bytes``."""
        size = self.size * math.prod(shape) * dtype.itemsize
        self._open = scattering = Scattering(self, *self._next(size, dtype), shape)
        return scattering

    def _next(self, size: int, dtype: torch.dtype) -> tuple[tuple[int, int, int], int]:
        """Finish what is open; header and turn of the next collective."""
        if self._open is not None:
            self._open.finish()
        self._sequence += 1
        return (self._sequence, size, DTYPES.index(dtype)), self._sequence & 1

    def release(self, operation: _Operation) -> None:
        """This collective is over, its slots are no longer needed."""
        if self._open is operation:
            self._open = None

    def mismatch(self, rank: int, mine: tuple[int, int, int], theirs: tuple[int, int, int]) -> str:
        other_rows = (
            ", or run it on other numbers of rows. Rows chosen by a mask, x[mask], are such: where a tensor mode "
            "exchanges samples (3d), compute all rows and choose with torch.where"
        )
        return (
            f"rank {self._ranks[self.index]} runs collective #{mine[0]} of its group with {mine[1]} bytes of "
            f"{DTYPES[mine[2]]}, rank {self._ranks[rank]} runs #{theirs[0]} with {theirs[1]} bytes of "
            f"{DTYPES[theirs[2]]}: the ranks do not run the same program{other_rows * (mine[::2] == theirs[::2])}. "
            f"Every rank must call the same layers in the same order, with tensors of the same shapes and dtypes: look "
            f"for what depends on the rank or on the data (an `if` in a forward, a batch of another size, a layer that "
            f"only some ranks call)"
        )

    @contextlib.contextmanager
    def errors_naming(self, rank: int) -> Iterator[None]:
        """Errors of a socket inside say which rank it leads to."""
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
        received = peer.recv(size - len(data))
        if not received:
            raise ConnectionResetError("end of stream")
        data += received
    return data
