"""Tensors of an accelerator that travel through the host's memory, for ranks joined by gloo.

NCCL refuses two ranks on one device, and gloo has few collectives of CUDA tensors and no messages. So under
``comm.backend = "gloo"`` a tensor is copied to the host, travels as one of the CPU does (through shared memory where
that can be), and what arrives is copied back. `to_host` waits until its copies are complete; what is copied back is
queued on the stream that is current when the result is waited for. Memory of copies is page-locked: torch gives it to
nobody else before a copy that was queued has read it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from colossus.comm.autograd import is_recorded
from colossus.comm.pending import Pending
from colossus.context.groups import AxisGroup


def is_needed(x: Tensor, group: AxisGroup) -> bool:
    """Whether ``x`` goes through the host between the ranks of this group."""
    return x.device.type != "cpu" and group.is_on_host


def wire_device(device: torch.device, group: AxisGroup) -> torch.device:
    """Where tensors of ``device`` are when they travel between the ranks of this group."""
    return torch.device("cpu") if device.type != "cpu" and group.is_on_host else device


def through_host(x: Tensor, collective: Callable[[Tensor], Pending], *, into: Tensor | None = None) -> Pending:
    """The collective of a copy of ``x`` on the host, its result back on the device; in ``into`` where that is given."""
    return collective(to_host(x)).then(lambda result: to_device(result, x.device, into))


def to_host(x: Tensor) -> Tensor:
    """A copy on the host, contiguous and complete."""
    (copy,) = all_to_host([x])
    return copy


def all_to_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies on the host, contiguous and complete: the device is waited for once."""
    tensors = list(tensors)
    if is_recorded():  # what is recorded is given back later, so nothing may be written in place
        return [x.to("cpu", memory_format=torch.contiguous_format, copy=True) for x in tensors]
    copies = [empty(x.shape, x.dtype, x.device).copy_(x.detach(), non_blocking=True) for x in tensors]
    for device in {x.device for x in tensors if x.device.type != "cpu"}:
        module: Any = torch.get_device_module(device)
        module.current_stream(device).record_event().synchronize()
    return copies


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host for what comes from a device, or goes there."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type != "cpu")


def to_device(x: Tensor, device: torch.device, into: Tensor | None = None) -> Tensor:
    """What has arrived, on its device; ``x`` may be dropped, and what lent its memory may change it, at once."""
    if is_recorded():
        return x.to(device)
    at_once = not x.is_pinned()  # memory that torch does not watch over
    return x.to(device, non_blocking=not at_once) if into is None else into.copy_(x, non_blocking=not at_once)


class BufferPool:
    """Buffers on the host that are used again: memory that is touched for the first time costs more than to be written
    to. From any thread.

    Args:
        most_bytes: of what is kept for later; None: all that comes back.
        pinned: memory is page-locked, for copies to and from an accelerator.
    """

    def __init__(self, most_bytes: int | None = None, *, pinned: bool = False) -> None:
        self._most_bytes, self._pinned = most_bytes, pinned
        self._lock = threading.Lock()
        self._free: dict[int, list[torch.UntypedStorage]] = {}
        self._kept = 0

    def take(self, size: int) -> Tensor:
        """Memory of ``size`` bytes, uint8."""
        rounded = rounded_size(size)
        with self._lock:
            free = self._free.get(rounded)
            if free:
                self._kept -= rounded
                return torch.empty(0, dtype=torch.uint8).set_(free.pop(), 0, (size,), (1,))
        return torch.empty(rounded, dtype=torch.uint8, pin_memory=self._pinned)[:size]

    def give_back(self, data: Tensor) -> None:
        """Give back the memory of `take`; nothing of it may be used any more."""
        storage = data.untyped_storage()
        size = storage.nbytes()
        if not size:
            return
        with self._lock:
            if self._most_bytes is None or self._kept + size <= self._most_bytes:
                self._kept += size
                self._free.setdefault(size, []).append(storage)


def rounded_size(size: int, least: int = 64) -> int:
    """To an eighth of a power of two, so that sizes which differ a little share memory."""
    step = max(least, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step
