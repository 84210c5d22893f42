"""Memory and streams that ranks of one host share, for collectives of CPU tensors and messages between them.

gloo sends every byte through a TCP connection, even to a neighbour on the same machine. Here each rank copies its
tensor into a slot that all ranks of the group have mapped, notifies its peers through a local socket, and reads theirs:
about five times faster for the activations of tensor parallelism (`colossus.comm.channel`).
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor
from torch import distributed as dist

from colossus.comm.channel import DTYPES, Channel, read_exactly
from colossus.comm.objects import all_gather_object
from colossus.context.groups import AxisGroup
from colossus.machine import memory_bytes

SLOT_BYTES = 8 << 20
_MIN_SEGMENT_BYTES = 64 << 10
_PAGE = 4096
_MAX_RANKS = 255
_INDEX = struct.Struct("<H")
_BACKLOG = 4096
#: a connection takes microseconds
_CONNECT_SECONDS = 5.0

_maps: WeakSet[mmap.mmap] = WeakSet()
#: those whose memory this rank has made
_allocated: WeakSet[mmap.mmap] = WeakSet()
_enabled = True
#: that a forked process (a data loader's worker) closes: a rank that dies would not be seen to while anybody has them
_streams: WeakSet[socket.socket] = WeakSet()


def _after_fork() -> None:
    for stream in tuple(_streams):
        stream.close()


os.register_at_fork(after_in_child=_after_fork)


def enable(enabled: bool) -> bool:
    """Whether groups made from now on may use shared memory; must agree on all ranks. Gives what it was before."""
    global _enabled
    before, _enabled = _enabled, enabled
    return before


def mapped_storages() -> set[int]:
    """Addresses at which mapped memory begins; it belongs to no single rank, so who counts a rank's memory skips it."""
    return {torch.frombuffer(memory, dtype=torch.uint8).data_ptr() for memory in _maps}


def channel_for(x: Tensor, group: AxisGroup) -> Channel | None:
    """The group's channel when ``x`` can go through it, else None. All ranks of the group must ask alike."""
    if x.device.type != "cpu" or x.nbytes > SLOT_BYTES or x.dtype not in DTYPES:
        return None
    channel = group.opened(Channel, lambda: _open_channel(group))
    return channel if channel is not None and x.nbytes <= channel.slot_bytes else None


@dataclass
class MappedMemory:
    """Memory that all ranks of a group have mapped, and streams between some of them.

    Attributes:
        timeout: of the group, in seconds.
        outgoing, incoming: the streams this rank and others have made, by the index at the other end.
    """

    memory: mmap.mmap
    segment_bytes: int
    timeout: float
    outgoing: dict[int, socket.socket]
    incoming: dict[int, socket.socket]

    def segment(self, number: int) -> Tensor:
        """The bytes of one of the equal segments."""
        whole = torch.frombuffer(self.memory, dtype=torch.uint8)
        return whole[number * self.segment_bytes :][: self.segment_bytes]


def map_segments(
    group: AxisGroup, num_segments: int, max_bytes: int, pairs: Sequence[tuple[int, int]]
) -> MappedMemory | None:
    """Map memory of equal segments, of at most ``max_bytes`` each, on all ranks; None, on all, where it cannot be.

    The memory has no name: others open it as a file of the process that has made it, which the kernel allows processes
    of the same user, and it is gone with the last process that maps it. Each rank listens in a folder that no other
    user can enter.

    Args:
        pairs: the streams to make, from an index to another, the same on all ranks of the group, which must all call.
    """
    if not _enabled or sys.platform != "linux" or group.size > _MAX_RANKS:
        return None
    if group.process_group is None or dist.get_backend(group.process_group) != "gloo":
        return None
    timeout = group.process_group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    outgoing: dict[int, socket.socket] = {}
    memory = None
    with ExitStack() as stack:
        made = _allocate(num_segments, max_bytes) if group.index == 0 else None
        if made is not None:
            stack.callback(os.close, made.descriptor)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="colossus-", ignore_cleanup_errors=True))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        path = f"{folder}/{group.index}"
        with suppress(OSError):  # the path is too long, say: then nobody can connect
            listener.bind(path)
            listener.listen(_BACKLOG)
        offers = all_gather_object((path, made), group)
        of_first = offers[0][1]
        if of_first is None:
            return None
        with suppress(OSError):  # another host, or a container with files of its own
            for to in (to for source, to in pairs if source == group.index):
                outgoing[to] = _connect(offers[to][0], group.index, timeout)
            memory = _map(of_first, of_first.segment_bytes * num_segments)
        # who cannot reach another says so before anybody waits for it
        is_reached = all(all_gather_object(memory is not None, group))
        if memory is None or not is_reached:
            for stream in outgoing.values():
                stream.close()
            return None
        incoming = dict(_accept(listener, timeout) for _, to in pairs if to == group.index)
    for stream in (*outgoing.values(), *incoming.values()):
        _streams.add(stream)
    _maps.add(memory)
    if group.index == 0:
        _allocated.add(memory)
    return MappedMemory(memory, of_first.segment_bytes, timeout, outgoing, incoming)


def _open_channel(group: AxisGroup) -> Channel | None:
    """Every rank has two slots, and a stream to every other."""
    pairs = [(rank, other) for rank in range(group.size) for other in range(rank)]
    mapped = map_segments(group, 2 * group.size, SLOT_BYTES, pairs)
    if mapped is None:
        return None
    slots = [[mapped.segment(rank * 2 + turn) for turn in (0, 1)] for rank in range(group.size)]
    return Channel(group, slots, dict(sorted((mapped.outgoing | mapped.incoming).items())))


def _connect(path: str, index: int, timeout: float) -> socket.socket:
    """A stream to the rank that listens at ``path``, from the one of this index in the group."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.settimeout(min(timeout, _CONNECT_SECONDS))
    stream.connect(path)
    stream.sendall(_INDEX.pack(index))
    stream.settimeout(timeout)
    return stream


def _accept(listener: socket.socket, timeout: float) -> tuple[int, socket.socket]:
    """The next of the ranks that have connected, by its index in the group."""
    stream, _ = listener.accept()
    stream.settimeout(timeout)
    (source,) = _INDEX.unpack(read_exactly(stream, _INDEX.size))
    return source, stream


@dataclass(frozen=True)
class _Memory:
    """A file without a name, as other processes of the user find it.

    Attributes:
        number: of the file in the system: another process's of the same number, in a container of its own, has not.
    """

    process: int
    descriptor: int
    number: tuple[int, int]
    segment_bytes: int


def _allocate(num_segments: int, max_bytes: int) -> _Memory | None:
    """Make the memory, really allocated so that no page can be missing later; None without room."""
    size = min(max_bytes, _room() // num_segments) // _PAGE * _PAGE
    if size < _MIN_SEGMENT_BYTES:
        return None
    descriptor = os.memfd_create("colossus")
    try:
        os.posix_fallocate(descriptor, 0, size * num_segments)
    except OSError:
        os.close(descriptor)
        return None
    return _Memory(os.getpid(), descriptor, _number_of(descriptor), size)


def _room() -> int:
    """Bytes that the next group may take.

    All groups of all ranks together take at most a quarter of the machine's (or the container's) memory, as if all
    ranks ran on it, and each at most a quarter of what is free.
    """
    total, available = memory_bytes()
    share = total // 4 // dist.get_world_size() - sum(map(len, _allocated))
    return share if available is None else min(share, available // 4)


def _number_of(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _map(memory: _Memory, size: int) -> mmap.mmap:
    """Raises OSError where it is not there."""
    descriptor = os.open(f"/proc/{memory.process}/fd/{memory.descriptor}", os.O_RDWR)
    try:
        if _number_of(descriptor) != memory.number:
            raise OSError("another file has this number")
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
