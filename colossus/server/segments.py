"""Memory that two processes of a host share: no name, handed over as a descriptor, gone with the last of them.

Who sends owns a pool of segments and writes arrays into them; the other end has mapped them, reads, and says when a
segment may be used again.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys
import tempfile
import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from colossus.comm.buffer_pool import rounded_size
from colossus.comm.peer_wire import WireError
from colossus.machine import memory_bytes

#: below, the bytes go through the socket: that is as fast
LEAST_BYTES = 32 << 10
_PAGE = 4096
#: each takes a descriptor at both ends
_MOST_SEGMENTS = 32
_MOST_POOL_BYTES = 1 << 30
#: of a peer's; what it has forgotten does not count
_MOST_MAPPED = 4 * _MOST_SEGMENTS
#: a free segment is taken for what is smaller by less than this factor
_MOST_WASTE = 4
# fcntl has them on Linux only
_ADD_SEALS, _GET_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033), getattr(fcntl, "F_GET_SEALS", 1034)
_SEAL_SHRINK = getattr(fcntl, "F_SEAL_SHRINK", 2)


@dataclass(eq=False)
class Segment:
    """Memory of this process that a peer can map.

    Attributes:
        number: unique in its pool.
        size: in bytes.
        memory: uint8 [size].
    """

    number: int
    size: int
    descriptor: int
    memory: Tensor = field(repr=False)


class SegmentPool:
    """The segments that one end of a connection writes to. From any thread.

    Args:
        most_bytes: of all of them; also never more than an eighth of what is free.
    """

    def __init__(self, most_bytes: int = _MOST_POOL_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        #: those that nobody uses, the longest unused first
        self._free: list[Segment] = []
        self._next = 0
        self._dropped: list[int] = []
        self.is_closed = False

    def take(self, size: int) -> Segment | None:
        """A segment of at least ``size`` bytes; None when there is none to be had."""
        with self._lock:
            if self.is_closed:
                return None
            fitting = [one for one in self._free if size <= one.size <= max(_MOST_WASTE * size, 2 * LEAST_BYTES)]
            if fitting:
                found = min(fitting, key=lambda one: one.size)
                self._free.remove(found)
                return found
            size = rounded_size(size, _PAGE)
            while self._free and (len(self._segments) >= _MOST_SEGMENTS or self._num_bytes() + size > self._most_bytes):
                self._drop(self._free.pop(0))
            if len(self._segments) >= _MOST_SEGMENTS or self._num_bytes() + size > self._most_bytes:
                return None
            _, available = memory_bytes()
            if available is not None and size > available // 8:
                return None
            try:
                segment = _make(self._next, size)
            except OSError:
                return None
            self._next += 1
            self._segments[segment.number] = segment
            return segment

    def give_back(self, segment: Segment) -> None:
        """It can be used again: the other end has read it."""
        with self._lock:
            if segment.number in self._segments:
                self._free.append(segment)

    def take_dropped(self) -> list[int]:
        """Numbers of segments that are no more, for the other end to forget. Each is told once."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
            return dropped

    def close(self) -> None:
        """Make no more, and give the memory back as soon as nobody uses it."""
        with self._lock:
            self.is_closed = True
            for segment in tuple(self._segments.values()):
                self._drop(segment)
            self._free.clear()

    def _num_bytes(self) -> int:
        return sum(segment.size for segment in self._segments.values())

    def _drop(self, segment: Segment) -> None:
        del self._segments[segment.number]
        self._dropped.append(segment.number)
        os.close(segment.descriptor)


class SegmentMap:
    """The segments of the other end, mapped. By one thread."""

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}

    def add(self, described: object, descriptor: int) -> None:
        """Map a segment. Nothing is done where it is mapped already.

        Args:
            described: its number and size in bytes, as they were sent.
            descriptor: this function's to close.

        Raises:
            WireError: it is no segment, or one of too many.
            OSError: it cannot be mapped.
        """
        try:
            if not isinstance(described, list) or [type(one) for one in described] != [int, int]:
                raise WireError("a segment of shared memory without number and size")
            number, size = described
            if number in self._memory:
                return
            if len(self._memory) >= _MOST_MAPPED:
                raise WireError(f"more than {_MOST_MAPPED} segments of shared memory")
            # what could be made shorter would be a fault in whoever reads it
            if hasattr(os, "memfd_create") and not fcntl.fcntl(descriptor, _GET_SEALS) & _SEAL_SHRINK:
                raise WireError("a segment of shared memory that is not sealed")
            if not 0 < size <= os.fstat(descriptor).st_size:
                raise WireError(f"a segment of shared memory of {size} bytes, which it has not")
            self._memory[number] = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        finally:
            os.close(descriptor)

    def memory(self, number: object, num_bytes: int) -> Tensor:
        """The first bytes of a segment. Raises `WireError` where there is no such."""
        found = self._memory.get(number) if type(number) is int else None
        if found is None or found.numel() < num_bytes:
            raise WireError(f"{num_bytes} bytes in a segment of shared memory that is not there, or smaller")
        return found[:num_bytes]

    def forget(self, numbers: object) -> None:
        """Of segments that are no more. Raises `WireError` for what is no list of numbers."""
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            raise WireError("segments to forget that are no list of numbers")
        for number in numbers:
            self._memory.pop(number, None)

    def close(self) -> None:
        """Nothing is read any more; what somebody still looks at stays until then."""
        self._memory.clear()


def _make(number: int, size: int) -> Segment:
    """Really allocated, so that no page can be missing later."""
    descriptor = _nameless()
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.truncate(descriptor, size)
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK)
        memory = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    except BaseException:
        os.close(descriptor)
        raise
    return Segment(number, size, descriptor, memory)


def _nameless() -> int:
    if hasattr(os, "memfd_create") and sys.platform == "linux":
        return os.memfd_create("colossus", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    descriptor, name = tempfile.mkstemp(prefix="colossus-")
    os.unlink(name)
    return descriptor
