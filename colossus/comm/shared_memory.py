"""Collectives between processes of one host through shared memory, for CPU tensors.

gloo sends every byte through a TCP connection, even to a neighbour on the same machine. Here each rank copies its
tensor into a slot that all ranks of the group have mapped, notifies its peers through a local socket, and reads theirs:
about five times faster for the activations of tensor parallelism. A peer that dies closes its socket and is noticed at
once; a peer that runs another collective is noticed because every message has a header that says which one it is.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch import distributed as dist

from colossus.comm.channel import DTYPES, Channel, read_exactly
from colossus.comm.objects import all_gather_object
from colossus.context.groups import AxisGroup

_FOLDER = Path("/dev/shm")
SLOT_BYTES = 8 << 20
_MIN_SEGMENT_BYTES = 64 << 10
_PAGE = 4096

_channels: WeakKeyDictionary[AxisGroup, Channel | None] = WeakKeyDictionary()
_maps: WeakSet[mmap.mmap] = WeakSet()
_enabled = True


def enable(enabled: bool) -> None:
    """Whether groups made from now on may use shared memory; must agree on all ranks."""
    global _enabled
    _enabled = enabled


def mapped_storages() -> set[int]:
    """Addresses at which mapped memory begins; it belongs to no single rank, so who counts a rank's memory skips it."""
    return {torch.frombuffer(memory, dtype=torch.uint8).data_ptr() for memory in _maps}


def channel_for(x: Tensor, group: AxisGroup) -> Channel | None:
    """The group's channel when ``x`` can go through it, else None. All ranks of the group must ask alike."""
    if x.device.type != "cpu" or x.nbytes > SLOT_BYTES or x.dtype not in DTYPES:
        return None
    if group not in _channels:
        _channels[group] = _open_channel(group)
    channel = _channels[group]
    return channel if channel is not None and x.nbytes <= channel.slot_bytes else None


@dataclass
class MappedFile:
    """A file that all ranks of a group have mapped, and the way to connect to each of them."""

    name: str
    memory: mmap.mmap
    segment_bytes: int
    timeout: float
    _listener: socket.socket

    def segment(self, number: int) -> Tensor:
        """The bytes of one of the equal segments."""
        whole = torch.frombuffer(self.memory, dtype=torch.uint8)
        return whole[number * self.segment_bytes :][: self.segment_bytes]

    def connect(self, index: int, me: int) -> socket.socket:
        """A stream to a rank of the group, which has to `accept`, now or later."""
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.settimeout(self.timeout)
        peer.connect(f"\0{self.name}-{index}")
        peer.sendall(bytes([me]))
        return peer

    def accept(self, count: int) -> dict[int, socket.socket]:
        """The streams that ``count`` other ranks have made to this one, by index. No more are taken afterwards."""
        peers: dict[int, socket.socket] = {}
        while len(peers) < count:
            peer, _ = self._listener.accept()
            peer.settimeout(self.timeout)
            peers[read_exactly(peer, 1)[0]] = peer
        self._listener.close()
        return peers


def map_segments(group: AxisGroup, num_segments: int, max_bytes: int) -> MappedFile | None:
    """Map one file of equal segments, of at most ``max_bytes`` each, on all ranks; None, on all, where it cannot be.

    All ranks of the group must call.
    """
    if not _enabled or sys.platform != "linux":
        return None
    if group.process_group is None or dist.get_backend(group.process_group) != "gloo":
        return None
    timeout = group.process_group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    name = f"colossus-{os.getpid()}-{secrets.token_hex(8)}"
    size = _create(name, num_segments, max_bytes) if group.index == 0 and group.size <= 255 else 0
    name, size = all_gather_object((name, size), group)[0]
    memory = listener = None
    if size:
        with contextlib.suppress(OSError):
            memory = _map(name, size * num_segments)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(f"\0{name}-{group.index}")
            listener.listen(group.size)
            listener.settimeout(timeout)
    ready = all(all_gather_object(memory is not None and listener is not None, group))
    if group.index == 0:
        with contextlib.suppress(OSError):
            (_FOLDER / name).unlink()
    if not ready or memory is None or listener is None:
        return None
    _maps.add(memory)
    return MappedFile(name, memory, size, timeout, listener)


def _open_channel(group: AxisGroup) -> Channel | None:
    """Every rank has two slots, and a stream to every other."""
    mapped = map_segments(group, 2 * group.size, SLOT_BYTES)
    if mapped is None:
        return None
    peers = {rank: mapped.connect(rank, group.index) for rank in range(group.index)}
    peers |= mapped.accept(group.size - 1 - group.index)
    slots = [[mapped.segment(rank * 2 + turn) for turn in (0, 1)] for rank in range(group.size)]
    return Channel(group, slots, dict(sorted(peers.items())))


def _create(name: str, num_segments: int, max_bytes: int) -> int:
    """Make the file, really allocated so that no page can be missing later. Bytes of a segment, 0 without room."""
    try:
        space = os.statvfs(_FOLDER)
        size = min(max_bytes, space.f_bavail * space.f_frsize // 4 // num_segments) // _PAGE * _PAGE
        if size < _MIN_SEGMENT_BYTES:
            return 0
        handle = os.open(_FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(handle, 0, size * num_segments)
        finally:
            os.close(handle)
    except OSError:
        with contextlib.suppress(OSError):
            (_FOLDER / name).unlink()
        return 0
    return size


def _map(name: str, size: int) -> mmap.mmap:
    handle = os.open(_FOLDER / name, os.O_RDWR)
    try:
        return mmap.mmap(handle, size)
    finally:
        os.close(handle)
