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


class _Collective:
    """A collective that was started on a channel: one function consumes the tensors of all ranks at once.

    One message to and from every peer says that its slot is filled.
    """

    def __init__(
        self,
        channel: Channel,
        header: tuple[int, int, int],
        turn: int,
        shape: torch.Size,
        fill: Fill,
        consume: Consume,
    ) -> None:
        self._channel, self._header, self._turn = channel, header, turn
        self._shape, self._consume = shape, consume
        self._result: Tensor | None = None
        self._unread = dict(channel.peers)
        fill(self._view(channel.index))
        for rank, peer in channel.peers.items():
            with channel.errors_naming(rank):
                peer.sendall(_HEADER.pack(*header))

    def wait(self) -> Tensor:
        """The result; called before the next collective starts, after which nothing of the slots may be needed."""
        if self._result is None:
            for rank in list(self._unread):
                peer = self._unread.pop(rank)
                with self._channel.errors_naming(rank):
                    theirs = _HEADER.unpack(read_exactly(peer, _HEADER.size))
                if theirs != self._header:
                    raise located_error(self._channel.mismatch(rank, self._header, theirs), RuntimeError)
            self._result = self._consume([self._view(rank) for rank in range(self._channel.size)])
            self._channel.release(self)
        return self._result

    def _view(self, rank: int) -> Tensor:
        """A rank's slot as a tensor."""
        _, size, dtype = self._header
        return self._channel.slots[rank][self._turn][:size].view(DTYPES[dtype]).view(self._shape)


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
        self._open: _Collective | None = None

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

    def _next(self, size: int, dtype: torch.dtype) -> tuple[tuple[int, int, int], int]:
        """Finish what is open; header and turn of the next collective."""
        if self._open is not None:
            self._open.wait()
        self._sequence += 1
        return (self._sequence, size, DTYPES.index(dtype)), self._sequence & 1

    def release(self, operation: _Collective) -> None:
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


def read_exactly(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        received = peer.recv(size - len(data))
        if not received:
            raise ConnectionResetError("end of stream")
        data += received
    return data
