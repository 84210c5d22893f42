"""Activations that wait in the memory of the host until backward wants them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

#: of each accelerator: the stream on which tensors come and go, and the copy that was started last
_streams: dict[torch.device, Any] = {}
_latest: dict[torch.device, weakref.ref[HostCopy]] = {}


class HostCopy:
    """A copy of a tensor in the host's memory, pinned where the tensor is on an accelerator.

    There it travels on a stream of its own, while the forward goes on; and when one comes back, the one that was sent
    before it is fetched, too: backward wants them in the reverse order. On CPU it is a copy, made at once.
    """

    def __init__(self, x: Tensor) -> None:
        self._device = x.device
        self._fetched: Tensor | None = None
        self._arrived: Any = None
        self._before: weakref.ref[HostCopy] | None = None
        x = x.detach()
        if x.device.type == "cpu":
            self._host = x.clone()
            return
        module: Any = torch.get_device_module(x.device)
        stream = self._stream()
        self._before, _latest[x.device] = _latest.get(x.device), weakref.ref(self)
        self._host = torch.empty_like(x, device="cpu", pin_memory=True)
        stream.wait_stream(module.current_stream(x.device))
        with module.stream(stream):
            self._host.copy_(x, non_blocking=True)
        x.record_stream(stream)  # its memory is not given to another tensor before it is copied

    def _stream(self) -> Any:
        if self._device not in _streams:
            _streams[self._device] = torch.get_device_module(self._device).Stream(self._device)
        return _streams[self._device]

    def start_fetch(self) -> None:
        """Send it back to its device, behind what travels already."""
        if self._fetched is not None:
            return
        stream = self._stream()
        with torch.get_device_module(self._device).stream(stream):
            self._fetched = self._host.to(self._device, non_blocking=True)
            self._arrived = stream.record_event()

    def fetch(self) -> Tensor:
        """The tensor on its device. Each call makes another one, so that it may be changed."""
        if self._device.type == "cpu":
            return self._host.clone()
        self.start_fetch()
        assert self._fetched is not None
        out, self._fetched = self._fetched, None
        here = torch.get_device_module(self._device).current_stream(self._device)
        here.wait_event(self._arrived)
        out.record_stream(here)
        before = self._before() if self._before is not None else None
        if before is not None:
            before.start_fetch()
        return out


def goes_to_host(x: Tensor) -> bool:
    """Whether a tensor is an activation: not a weight or a view of one, nor a mask or ids, which all blocks share."""
    return x.is_floating_point() and not isinstance(x, nn.Parameter) and not isinstance(x._base, nn.Parameter)


def to_host(x: Tensor) -> Tensor | HostCopy:
    """A copy in the host's memory; what does not go there as it is."""
    return HostCopy(x) if goes_to_host(x) else x


def from_host(kept: Tensor | HostCopy) -> Tensor:
    """What `to_host` was given."""
    return kept.fetch() if isinstance(kept, HostCopy) else kept
