"""A process whose CPU tensors take themselves for ones of an accelerator that gloo has to carry: they are staged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from colossus.comm import host_staging
from colossus.context.groups import AxisGroup


class ThroughHost:
    """What went through the host since `pretend`.

    Attributes:
        copies: to the host.
        returned: results that were copied back.
    """

    copies = 0
    returned = 0


def pretend() -> type[ThroughHost]:
    """From here on in this process, which ends with its test, tensors are on a device, but for copies on the host."""
    real_copies, real_device, real_empty = host_staging.all_to_host, host_staging.to_device, host_staging.empty

    def marked(x: Tensor) -> Tensor:
        x.is_on_host = True  # type: ignore[attr-defined]
        return x

    def all_to_host(tensors: Any) -> list[Tensor]:
        copies = real_copies(tensors)
        if not torch.compiler.is_compiling():
            ThroughHost.copies += len(copies)
        return [marked(x) for x in copies]

    def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return marked(real_empty(shape, dtype, device))

    def to_device(x: Tensor, device: torch.device, into: Tensor | None = None) -> Tensor:
        if not torch.compiler.is_compiling():
            ThroughHost.returned += 1
        return real_device(x.clone(), device, into)

    def is_needed(x: Tensor, group: AxisGroup) -> bool:
        return group.is_on_host and not getattr(x, "is_on_host", False)

    def wire_device(device: torch.device, group: AxisGroup) -> torch.device:
        return torch.device("cpu", 0) if group.is_on_host else device  # another one, of the same type

    for function in (all_to_host, empty, to_device, is_needed, wire_device):
        setattr(host_staging, function.__name__, function)
    return ThroughHost
