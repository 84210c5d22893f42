"""Memory of the host in which the tensors of a checkpoint wait until they are written."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


class Staging:
    """Memory of the host that tensors are copied to, kept from one checkpoint to the next.

    It is pinned if tensors come from an accelerator, so that copies need not wait for each other; else it has large
    pages, which are faster to allocate.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self._memory.numel() if self._memory is not None else 0

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return contiguous copies on the host, valid until the next call. Waits for devices once."""
        sizes = [-(-tensor.numel() * tensor.element_size() // 64) * 64 for tensor in tensors]
        devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        self._reserve(sum(sizes), is_pinned=bool(devices))
        copies, start = [], 0
        assert self._memory is not None
        for tensor, size in zip(tensors, sizes, strict=True):
            used = tensor.numel() * tensor.element_size()
            copies.append(self._memory[start : start + used].view(tensor.dtype).view(tensor.shape))
            start += size
        by_kind: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
        for copy, tensor in zip(copies, tensors, strict=True):
            if tensor.numel():
                targets, sources = by_kind.setdefault((tensor.dtype, tensor.device), ([], []))
                targets.append(copy)
                sources.append(tensor)
        for (_, device), (targets, sources) in by_kind.items():
            torch._foreach_copy_(targets, sources, non_blocking=device.type != "cpu")
        for device in devices:
            torch.accelerator.synchronize(device)
        return copies

    def _reserve(self, num_bytes: int, *, is_pinned: bool) -> None:
        if self.num_bytes >= num_bytes:
            return
        self._memory = None
        if is_pinned:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            return
        memory = mmap.mmap(-1, max(num_bytes, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
