"""Memory and streams that ranks of one host share, for collectives of CPU tensors and messages between them.

gloo sends every byte through a TCP connection, even to a neighbour on the same machine. Here each rank copies its
tensor into a slot that all ranks of the group have mapped, notifies its peers through a local socket, and reads their
slots (`colossus.comm.channel`). This is about five times faster for the activations of tensor parallelism.
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
#: the timeout of a connection, which takes microseconds
_CONNECT_SECONDS = 5.0

_maps: WeakSet[mmap.mmap] = WeakSet()
#: the maps whose memory this rank allocated
_allocated: WeakSet[mmap.mmap] = WeakSet()
_enabled = True
#: the streams that a forked process (a data loader's worker) must close: while it had them open, peers would not notice
#: that the rank died
_streams: WeakSet[socket.socket] = WeakSet()


def _after_fork() -> None:
    for stream in tuple(_streams):
        stream.close()


os.register_at_fork(after_in_child=_after_fork)


def enable(enabled: bool) -> bool:
    """Let groups made from now on use shared memory, or not; the same on all ranks. Return the setting before."""
    global _enabled
    before, _enabled = _enabled, enabled
    return before


def mapped_storages() -> set[int]:
    """Return the addresses of mapped memory, which a count of one rank's memory leaves out since ranks share it."""
    return {torch.frombuffer(memory, dtype=torch.uint8).data_ptr() for memory in _maps}


def piece_bytes() -> int:
    """Return the size in which large tensors are cut, and small ones joined, on any device: that of a slot."""
    return SLOT_BYTES


def flat_limit(device: torch.device) -> int | None:
    """Return the most bytes of a flat tensor in which many small ones travel: those of a slot on a CPU, else None."""
    return SLOT_BYTES if device.type == "cpu" else None


def channel_for(x: Tensor, group: AxisGroup, nbytes: float | None = None) -> Channel | None:
    """Return the group's channel, or None where ``x`` cannot go through it. All ranks of the group must call alike.

    Args:
        x: the tensor.
        group: the ranks.
        nbytes: the most bytes that a rank gives; None: those of ``x``.
    """
    nbytes = x.nbytes if nbytes is None else nbytes
    if x.device.type != "cpu" or nbytes > SLOT_BYTES or x.dtype not in DTYPES:
        return None
    channel = group.opened(Channel, lambda: _open_channel(group))
    return channel if channel is not None and nbytes <= channel.slot_bytes else None


@dataclass
class MappedMemory:
    """Memory that all ranks of a group have mapped, and streams between some of them.

    Attributes:
        memory: the mapped memory, of equal segments.
        segment_bytes: the size of a segment.
        timeout: the group's timeout in seconds.
        outgoing: the streams that this rank has made, by the index at the other end.
        incoming: the streams that other ranks have made to this one, by their index.
    """

    memory: mmap.mmap
    segment_bytes: int
    timeout: float
    outgoing: dict[int, socket.socket]
    incoming: dict[int, socket.socket]

    def segment(self, number: int) -> Tensor:
        """Return the bytes of one segment."""
        whole = torch.frombuffer(self.memory, dtype=torch.uint8)
        return whole[number * self.segment_bytes :][: self.segment_bytes]


def map_segments(
    group: AxisGroup, num_segments: int, max_bytes: int, pairs: Sequence[tuple[int, int]]
) -> MappedMemory | None:
    """Map memory of equal segments on all ranks of the group, which must all call.

    The memory has no name. Other ranks open it as a file of the process that has allocated it, which the kernel allows
    to processes of the same user. It is gone with the last process that maps it. Each rank listens in a folder that no
    other user can enter.

    Args:
        num_segments: the number of segments, the same on all ranks.
        max_bytes: the most bytes of a segment.
        pairs: the streams to make, from an index to another, the same on all ranks.

    Returns:
        The memory, or None, on all ranks, where some rank cannot map it.
    """
    if not _enabled or sys.platform != "linux" or group.size > _MAX_RANKS or not group.is_on_host:
        return None
    assert group.process_group is not None
    timeout = group.process_group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    outgoing: dict[int, socket.socket] = {}
    memory = None
    with ExitStack() as stack:
        own_memory = _allocate(num_segments, max_bytes) if group.index == 0 else None
        if own_memory is not None:
            stack.callback(os.close, own_memory.descriptor)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="colossus-", ignore_cleanup_errors=True))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        path = f"{folder}/{group.index}"
        with suppress(OSError):  # the path may be too long, and then no rank can connect
            listener.bind(path)
            listener.listen(_BACKLOG)
        offers = all_gather_object((path, own_memory), group)
        offered = offers[0][1]
        if offered is None:
            return None
        with suppress(OSError):  # another host, or a container with files of its own
            for to in (to for source, to in pairs if source == group.index):
                outgoing[to] = _connect(offers[to][0], group.index, timeout)
            memory = _map(offered, offered.segment_bytes * num_segments)
        # a rank that cannot reach another says so before any rank waits for it
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
    return MappedMemory(memory, offered.segment_bytes, timeout, outgoing, incoming)


def _open_channel(group: AxisGroup) -> Channel | None:
    """Return a channel in which every rank has two slots and a stream to every other rank; None where that fails."""
    if not group.is_on_host:  # the pairs of thousands of ranks need not be listed
        return None
    pairs = [(rank, other) for rank in range(group.size) for other in range(rank)]
    mapped = map_segments(group, 2 * group.size, SLOT_BYTES, pairs)
    if mapped is None:
        return None
    slots = [[mapped.segment(rank * 2 + turn) for turn in (0, 1)] for rank in range(group.size)]
    return Channel(group, slots, dict(sorted((mapped.outgoing | mapped.incoming).items())))


def _connect(path: str, index: int, timeout: float) -> socket.socket:
    """Return a stream to the rank that listens at ``path``, from the rank at ``index`` of the group."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.settimeout(min(timeout, _CONNECT_SECONDS))
    stream.connect(path)
    stream.sendall(_INDEX.pack(index))
    stream.settimeout(timeout)
    return stream


def _accept(listener: socket.socket, timeout: float) -> tuple[int, socket.socket]:
    """Return the index of the next rank that has connected, and its stream."""
    stream, _ = listener.accept()
    stream.settimeout(timeout)
    (source,) = _INDEX.unpack(read_exactly(stream, _INDEX.size))
    return source, stream


@dataclass(frozen=True)
class _Memory:
    """A file without a name, described so that other processes of the same user can open it.

    Attributes:
        process: the id of the process that has it open.
        descriptor: the file's descriptor in that process.
        number: device and inode of the file. They tell it from a file of a process with the same id in another
            container.
        segment_bytes: the size of a segment.
    """

    process: int
    descriptor: int
    number: tuple[int, int]
    segment_bytes: int


def _allocate(num_segments: int, max_bytes: int) -> _Memory | None:
    """Allocate the memory with all of its pages, so that none can be missing later; return None without room."""
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
    """Return the bytes that the next group may allocate.

    All groups of all ranks together take at most a quarter of the memory of the machine (or the container), counted as
    if all ranks ran on it. Each group takes at most a quarter of what is free.
    """
    total, available = memory_bytes()
    share = total // 4 // dist.get_world_size() - sum(map(len, _allocated))
    return share if available is None else min(share, available // 4)


def _number_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _map(memory: _Memory, size: int) -> mmap.mmap:
    """Map the memory.

    Raises:
        OSError: the process is gone, or runs in another container.
    """
    descriptor = os.open(f"/proc/{memory.process}/fd/{memory.descriptor}", os.O_RDWR)
    try:
        if _number_of(descriptor) != memory.number:
            raise OSError("another file has this number")
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
