"""Asynchronous copies of numbers from an accelerator to the host, and of tensors from the host to a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class HostRead:
    """An asynchronous copy of a tensor to the host, in its place in the order of the device's work.

    `wait` waits for this copy and for no later work. A host that reads the numbers of the step before, while the device
    works on the current one, hardly waits, and the device never does. A CPU tensor is there at once. Several threads
    may read the copy.
    """

    def __init__(self, values: Tensor) -> None:
        self._host, self._arrived = values.detach(), None
        self._is_late = values.device.type != "cpu"
        if self._is_late:
            module: Any = torch.get_device_module(values.device)
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._arrived = module.Event()
            self._arrived.record(module.current_stream(values.device))  # the copy's stream, whatever device is current

    def send_to_host(self) -> bool:
        """Return whether the copy comes from an accelerator, and is best waited for a step later (`Late`)."""
        return self._is_late

    @property
    def has_arrived(self) -> bool:
        """Return whether the copy is complete."""
        arrived = self._arrived
        return arrived is None or bool(arrived.query())

    def wait(self) -> Tensor:
        """Wait for the copy, and return it."""
        arrived = self._arrived
        if arrived is not None:
            arrived.synchronize()
            self._arrived = None
        return self._host


def send_to(device: torch.device, x: Tensor) -> Tensor:
    """Copy a host tensor to a device without waiting; work that the device is given afterwards sees the copy.

    The copy is made from page-locked memory, since from other memory the host would wait until the device comes to it.
    torch does not reuse page-locked memory before the copy is over.
    """
    if device.type == "cpu" or x.layout is not torch.strided:
        return x.to(device)
    return torch.empty_like(x, pin_memory=True).copy_(x).to(device, non_blocking=True)


#: device -> the stream on which tensors of the host travel to it beside its products
_streams: dict[torch.device, Any] = {}


@contextmanager
def beside_products(device: torch.device) -> Iterator[None]:
    """Queue what is called inside on a stream of its own, behind what the current stream has been given so far.

    The caller lets the current stream wait for the result. Memory that is allocated inside and used outside has to be
    told so (``record_stream``). On the CPU nothing changes.
    """
    if device.type == "cpu":
        yield
        return
    module: Any = torch.get_device_module(device)
    if device not in _streams:
        _streams[device] = module.Stream(device)
    _streams[device].wait_stream(module.current_stream(device))
    with module.stream(_streams[device]):
        yield
