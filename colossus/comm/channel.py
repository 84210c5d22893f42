"""The slots and sockets of one group of processes on one host, and the collectives that run through them."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from colossus.comm.peer_gone import PeerGone
from colossus.context.groups import AxisGroup
from colossus.context.program import WHY, subject_name
from colossus.error_place import located_error

Consume = Callable[[list[Tensor]], Tensor]
Fill = Callable[[Tensor], object]

_HEADER = struct.Struct("<QQQQ")  # sequence number, bytes, dtype, subject

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


class Channel:
    """The mapped slots and the sockets of one group.

    Every rank has two slots and uses them in turn. At most one collective is open: starting the next one finishes it
    first. So a peer's message about collective k + 1 also says that it has read all of collective k, and that the
    slots of k are free again. A peer that dies closes its socket, which the others notice at once. A peer that runs
    another collective is noticed by the header of its message, which has the collective's number, size, dtype and
    subject (`context.program`).
    """

    def __init__(self, group: AxisGroup, slots: list[list[Tensor]], peers: dict[int, socket.socket]) -> None:
        self.index, self._ranks, self._program = group.index, group.ranks, group.program
        self.peers = peers
        self.slots = slots
        self.slot_bytes = slots[0][0].numel()
        self._sequence = 0
        self._open: Callable[[], Tensor] | None = None

    def start(self, x: Tensor, consume: Consume) -> Callable[[], Tensor]:
        """Share ``x`` with the group.

        Args:
            x: a tensor of at most ``slot_bytes``, of the same shape and dtype on every rank.
            consume: makes the result of the tensors of all ranks, in group order; they are valid only during the call.

        Returns:
            A function that waits for the other ranks and returns the result of ``consume``.
        """
        return self.start_filled(x.shape, x.dtype, lambda slot: slot.copy_(x.detach()), consume)

    def start_filled(self, shape: torch.Size, dtype: torch.dtype, fill: Fill, consume: Consume) -> Callable[[], Tensor]:
        """Share a tensor that ``fill`` writes into this rank's slot, else as `start`."""
        if self._open is not None:
            self._open()
        self._sequence += 1
        size, turn = math.prod(shape) * dtype.itemsize, self._sequence & 1
        header = self._sequence, size, DTYPES.index(dtype), self._program.key
        views = [slots[turn][:size].view(dtype).view(shape) for slots in self.slots]
        unread = dict(self.peers)
        result: Tensor | None = None

        def wait() -> Tensor:
            nonlocal result
            if result is None:
                for rank in list(unread):
                    peer = unread.pop(rank)
                    with self._errors_naming(rank):
                        theirs = _HEADER.unpack(read_exactly(peer, _HEADER.size))
                    if theirs != header:
                        raise located_error(self._mismatch(rank, header, theirs), RuntimeError)
                result = consume(views)
                views.clear()
                if self._sequence == header[0]:  # `is wait` would make a cycle that keeps the tensors alive
                    self._open = None
            return result

        fill(views[self.index])
        for rank, peer in self.peers.items():
            with self._errors_naming(rank):
                peer.sendall(_HEADER.pack(*header))
        self._open = wait
        return wait

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()

    def _mismatch(self, rank: int, mine: tuple[int, ...], theirs: tuple[int, ...]) -> str:
        def name(header: tuple[int, ...]) -> str:
            return f" ({subject_name(header[3])})" if mine[3] != theirs[3] else ""

        return (
            f"rank {self._ranks[self.index]} runs collective #{mine[0]} of its group{name(mine)} with {mine[1]} bytes "
            f"of {DTYPES[mine[2]]}, rank {self._ranks[rank]} runs #{theirs[0]}{name(theirs)} with {theirs[1]} bytes of "
            f"{DTYPES[theirs[2]]}: {WHY}"
        )

    @contextlib.contextmanager
    def _errors_naming(self, rank: int) -> Iterator[None]:
        """Turn errors of a socket into a `PeerGone` that names the rank at its other end."""
        try:
            yield
        except TimeoutError as error:
            raise PeerGone(
                f"timeout: rank {self._ranks[rank]} did not come to collective #{self._sequence} within "
                f"{self.peers[rank].gettimeout():.0f} s"
            ) from error
        except OSError as error:
            raise PeerGone(f"Connection closed by peer: rank {self._ranks[rank]} is gone ({error})") from error


def read_exactly(peer: socket.socket, size: int) -> bytes:
    """Return the next ``size`` bytes of a stream.

    Raises:
        ConnectionResetError: the stream ends before.
    """
    data = b""
    while len(data) < size:
        received = peer.recv(size - len(data))
        if not received:
            raise ConnectionResetError("end of stream")
        data += received
    return data
