"""The slots and sockets of one group of processes on one host, and the collectives that run through them."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from colossus.comm.peer_gone import PeerGone
from colossus.comm.pending import Pending
from colossus.comm.tensor_transport import Fill, Lengths, Take, TensorTransport, taken
from colossus.context.groups import AxisGroup
from colossus.context.program import WHY, subject_name
from colossus.error_place import located_error

Consume = Callable[[list[Tensor]], Tensor]

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


class Channel(TensorTransport):
    """The mapped slots and the sockets of one group.

    Every rank has two slots and uses them in turn. At most one collective is open: starting the next one finishes it
    first. So a peer's message about collective k + 1 also says that it has read all of collective k, and that the
    slots of k are free again. A peer that dies closes its socket, which the others notice at once. A peer that runs
    another collective is noticed by the header of its message, which has the collective's number, size, dtype and
    subject (`context.program`).
    """

    def __init__(self, group: AxisGroup, slots: list[list[Tensor]], peers: dict[int, socket.socket]) -> None:
        super().__init__(group)
        self.index, self._ranks, self._program = group.index, group.ranks, group.program
        self.peers = peers
        self.slots = slots
        self.slot_bytes = slots[0][0].numel()
        self._sequence = 0
        self._open: Callable[[], Tensor] | None = None

    # -- collectives ----------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, op: str, owned: bool) -> Pending:
        into, combine = x if owned else None, torch.add if op == "sum" else torch.maximum
        return self._share(x, lambda tensors: _combined(tensors, combine, into))

    def all_gather(self, x: Tensor, dim: int) -> Pending:
        return self._share(x, lambda tensors: torch.cat(tensors, dim))

    def reduce_scatter(self, x: Tensor, dim: int) -> Pending:
        own = self._own_chunk(x, dim)
        return self._share(x, lambda tensors: _combined([x.narrow(*own) for x in tensors], torch.add))

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Pending:
        own = self._own_chunk(x, split_dim)
        return self._share(x, lambda tensors: torch.cat([x.narrow(*own) for x in tensors], concat_dim))

    def exchange_rows(self, x: Tensor, lengths: Lengths) -> Pending:
        ends = [[0, *accumulate(row)] for row in lengths.matrix]
        return self._share_rows(x, [(row[self.index], row[self.index + 1]) for row in ends], [row[-1] for row in ends])

    def gather_rows(self, x: Tensor, lengths: Sequence[int]) -> Pending:
        return self._share_rows(x, [(0, length) for length in lengths], lengths)

    def gather_filled(self, x: Tensor, fill: Fill, take: Take) -> Pending:
        return self.start(x.shape, x.dtype, fill, lambda rows: taken(take, [row[None] for row in rows]))

    def scatter_filled(self, x: Tensor, fill: Fill, take: Take) -> Pending:
        return self.start(x.shape, x.dtype, fill, lambda stacked: taken(take, [rows[self.index] for rows in stacked]))

    def _own_chunk(self, x: Tensor, dim: int) -> tuple[int, int, int]:
        size = x.shape[dim] // self.group.size
        return dim, self.index * size, size

    def _share(self, x: Tensor, consume: Consume) -> Pending:
        """Share ``x``, of the same shape and dtype on every rank."""
        return self.start(x.shape, x.dtype, lambda slot: slot.copy_(x.detach()), consume)

    def _share_rows(self, x: Tensor, spans: Sequence[tuple[int, int]], rows: Sequence[int]) -> Pending:
        """Share rows, and concatenate parts of those of all ranks.

        Args:
            x: this rank's rows.
            spans: for each rank, the range of its rows that this rank reads.
            rows: the number of rows of each rank.
        """
        own, shape = x.detach(), torch.Size((max(rows), *x.shape[1:]))

        def consume(slots: list[Tensor]) -> Tensor:
            return torch.cat([slot[start:stop] for slot, (start, stop) in zip(slots, spans, strict=True)])

        return self.start(shape, x.dtype, lambda slot: slot[: len(own)].copy_(own), consume)

    # -- the exchange -----------------------------------------------------------------------------------------

    def start(self, shape: torch.Size, dtype: torch.dtype, fill: Fill, consume: Consume) -> Pending:
        """Share a tensor of at most ``slot_bytes`` with the group.

        Args:
            shape, dtype: of the tensor, the same on every rank.
            fill: writes it into this rank's slot.
            consume: makes the result of the tensors of all ranks, in group order; they are valid only during the call.

        Returns:
            The result of ``consume``, for which the other ranks are waited for.
        """
        if self._open is not None:
            self._open()
        self._sequence += 1
        size, turn = math.prod(shape) * dtype.itemsize, self._sequence & 1
        header = self._sequence, size, DTYPES.index(dtype), self._program.key
        views = [slots[turn][:size].view(dtype).view(shape) for slots in self.slots]
        headers: dict[int, tuple[int, ...]] = {}  # of the ranks that have come
        result: Tensor | None = None

        def wait() -> Tensor:
            nonlocal result
            if result is None:
                for rank, peer in self.peers.items():
                    if rank not in headers:
                        with self._errors_naming(rank):
                            headers[rank] = _HEADER.unpack(read_exactly(peer, _HEADER.size))
                    if headers[rank] != header:
                        raise located_error(self._mismatch(rank, header, headers[rank]), RuntimeError)
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
        return Pending(wait)

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


def _combined(tensors: list[Tensor], combine: Callable[..., Tensor], into: Tensor | None = None) -> Tensor:
    """Return the sum or maximum of the ranks' tensors, in rank order on every rank, so that all get the same bits."""
    total = combine(tensors[0], tensors[1]) if into is None else combine(tensors[0], tensors[1], out=into)
    for x in tensors[2:]:
        combine(total, x, out=total)
    return total


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
