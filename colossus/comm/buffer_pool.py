"""Memory that is used again: new memory costs more to be touched for the first time than to be written to."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class BufferPool:
    """Buffers on the host. From any thread.

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
