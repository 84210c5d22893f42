"""Copies between an accelerator and the host, for collectives and messages that gloo carries.

NCCL refuses two ranks on one device, and gloo has few collectives of CUDA tensors and no messages. So under
``comm.backend = "gloo"`` a tensor is copied to the host, travels like a CPU tensor (through shared memory where
possible), and its result is copied back. `to_host` waits until its copies are complete. The copy back is queued on the
stream that is current when the result is waited for. Copies lie in page-locked memory, which torch does not reuse
before a queued copy has read it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from colossus.comm.autograd import is_recorded
from colossus.comm.pending import Pending
from colossus.comm.tensor_transport import Lengths, TensorTransport
from colossus.context.groups import AxisGroup


def is_needed(x: Tensor, group: AxisGroup) -> bool:
    """Return whether ``x`` goes through the host between the ranks of this group."""
    return x.device.type != "cpu" and group.is_on_host


def wire_device(device: torch.device, group: AxisGroup) -> torch.device:
    """Return the device from which tensors of ``device`` travel between the ranks of this group."""
    return torch.device("cpu") if device.type != "cpu" and group.is_on_host else device


class ThroughHost(TensorTransport):
    """The collectives of tensors of a device whose copies on the host travel.

    Args:
        group: the ranks.
        transport_of: returns the transport of a copy.
    """

    def __init__(self, group: AxisGroup, transport_of: Callable[[Tensor], TensorTransport]) -> None:
        super().__init__(group)
        self._transport_of = transport_of

    def _start(self, name: str, x: Tensor, *args: Any, into: Tensor | None = None) -> Pending:
        copy = to_host(x)
        pending: Pending = getattr(self._transport_of(copy), name)(copy, *args)
        return pending.then(lambda result: to_device(result, x.device, into))

    def all_reduce(self, x: Tensor, op: str, owned: bool) -> Pending:
        return self._start("all_reduce", x, op, True, into=x if owned else None)

    def broadcast(self, x: Tensor, source: int) -> Pending:
        return self._start("broadcast", x, source, into=x)

    def all_gather(self, x: Tensor, dim: int) -> Pending:
        return self._start("all_gather", x, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Pending:
        return self._start("reduce_scatter", x, dim)

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Pending:
        return self._start("all_to_all", x, split_dim, concat_dim)

    def exchange_rows(self, x: Tensor, lengths: Lengths) -> Pending:
        return self._start("exchange_rows", x, lengths)

    def gather_rows(self, x: Tensor, lengths: Sequence[int]) -> Pending:
        return self._start("gather_rows", x, lengths)


def to_host(x: Tensor) -> Tensor:
    """Return a copy on the host, contiguous and complete."""
    (copy,) = all_to_host([x])
    return copy


def all_to_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return copies on the host, contiguous and complete; the device is waited for once."""
    tensors = list(tensors)
    if is_recorded():  # recorded values are used again later, so nothing may be written in place
        return [x.to("cpu", memory_format=torch.contiguous_format, copy=True) for x in tensors]
    copies = [empty(x.shape, x.dtype, x.device).copy_(x.detach(), non_blocking=True) for x in tensors]
    for device in {x.device for x in tensors if x.device.type != "cpu"}:
        module: Any = torch.get_device_module(device)
        module.current_stream(device).record_event().synchronize()
    return copies


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return host memory for copies from or to a device."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type != "cpu")


def to_device(x: Tensor, device: torch.device, into: Tensor | None = None) -> Tensor:
    """Copy a host tensor to its device, or into ``into``; the memory of ``x`` may be reused at once."""
    if is_recorded():
        return x.to(device)
    # torch protects page-locked memory until a queued copy has read it, and no other memory
    is_queued = x.is_pinned()
    return x.to(device, non_blocking=is_queued) if into is None else into.copy_(x, non_blocking=is_queued)


class BufferPool:
    """Host buffers that are reused, since the first touch of new memory costs more than writing to it. Thread-safe.

    Args:
        max_bytes: the most bytes of free buffers that the pool keeps; None: all that come back.
        pinned: memory is page-locked, for copies to and from an accelerator.
    """

    def __init__(self, max_bytes: int | None = None, *, pinned: bool = False) -> None:
        self._max_bytes, self._pinned = max_bytes, pinned
        self._lock = threading.Lock()
        self._free: dict[int, list[torch.UntypedStorage]] = {}
        self._free_bytes = 0

    def take(self, size: int) -> Tensor:
        """Return memory of ``size`` bytes, uint8."""
        rounded = _rounded_size(size)
        with self._lock:
            free = self._free.get(rounded)
            if free:
                self._free_bytes -= rounded
                return torch.empty(0, dtype=torch.uint8).set_(free.pop(), 0, (size,), (1,))
        return torch.empty(rounded, dtype=torch.uint8, pin_memory=self._pinned)[:size]

    def give_back(self, data: Tensor) -> None:
        """Take back memory of `take`, which the caller must not use any more."""
        storage = data.untyped_storage()
        size = storage.nbytes()
        if not size:
            return
        with self._lock:
            if self._max_bytes is None or self._free_bytes + size <= self._max_bytes:
                self._free_bytes += size
                self._free.setdefault(size, []).append(storage)


def _rounded_size(size: int) -> int:
    """Round up to a multiple of an eighth of a power of two, so that sizes which differ a little share memory."""
    step = max(64, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step
