"""Batches on their way to an accelerator: out of pinned memory, on a stream of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from colossus.data.batch import Batch, to_tensors
from colossus.nest import map_leaves


@dataclass(frozen=True)
class Arrival:
    """A batch whose tensors are being copied to the device.

    Attributes:
        copied: behind the copies, on their stream; None where there is nothing to wait for.
        tensors: what was copied there.
    """

    batch: Batch
    copied: torch.cuda.Event | None
    tensors: tuple[torch.Tensor, ...]

    def get(self) -> Batch:
        """The batch, for work that is queued on the current stream from here on. The host does not wait."""
        if self.copied is not None and self.tensors:
            here = torch.cuda.current_stream(self.tensors[0].device)
            here.wait_event(self.copied)
            for tensor in self.tensors:
                tensor.record_stream(here)  # its memory belongs to the stream of the copies
        return self.batch


class DeviceCopy:
    """Puts batches on one device. Off CUDA that happens at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        #: behind the copies out of pinned memory of the user's own, which they may fill again
        self._reads_theirs: torch.cuda.Event | None = None

    @property
    def is_asynchronous(self) -> bool:
        return self.device.type == "cuda"

    def start(self, batch: Batch) -> Arrival:
        """Copy a batch, of which numpy arrays of numbers become tensors."""
        if self.device.type != "cuda":
            return Arrival(to_tensors(batch, self.device), None, ())
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        copied: list[torch.Tensor] = []
        pinned: dict[int, torch.Tensor] = {}
        theirs = False

        def pin(leaf: Any) -> Any:
            nonlocal theirs
            if not isinstance(leaf, torch.Tensor) or not _can_be_pinned(leaf):
                return leaf
            if leaf.is_pinned():
                theirs, pinned[id(leaf)] = True, leaf
                return leaf
            host = torch.empty_like(leaf, pin_memory=True).copy_(leaf)
            pinned[id(host)] = host
            return host

        def send(leaf: Any) -> Any:
            if id(leaf) not in pinned:
                return leaf
            copied.append(leaf.to(self.device, non_blocking=True))
            return copied[-1]

        on_host = map_leaves(pin, to_tensors(batch))
        with torch.cuda.stream(self._stream):
            on_device = map_leaves(send, on_host)
            event = torch.cuda.Event()
            event.record(self._stream)
        if theirs:
            self._reads_theirs = event
        return Arrival(to_tensors(on_device, self.device), event, tuple(copied))

    def let_go(self) -> None:
        """Wait until nothing reads the user's own pinned memory any more: what they read next may be written to it."""
        if self._reads_theirs is not None:
            self._reads_theirs.synchronize()
            self._reads_theirs = None


def _can_be_pinned(leaf: torch.Tensor) -> bool:
    return leaf.device.type == "cpu" and leaf.layout is torch.strided and not leaf.requires_grad and leaf.numel() > 0
