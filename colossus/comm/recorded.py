"""Whether somebody looks at tensor operations as they run: then collectives are out of place, as functional ops."""

from __future__ import annotations

import torch
from torch import distributed as dist

from colossus.context.groups import is_fake

_FAKE_TENSORS = torch._C._TorchDispatchModeKey.FAKE


def is_recorded() -> bool:
    """Whether tensor operations are being traced or recorded by a dispatch mode. Fake tensors among fake ranks are not:
    there the collectives are those that real ones take."""
    if torch.compiler.is_compiling():
        return True
    num_modes = torch._C._len_torch_dispatch_stack()
    if num_modes == 1 and torch._C._get_dispatch_mode(_FAKE_TENSORS) is not None:
        return not is_fake(dist.group.WORLD)
    return num_modes > 0
