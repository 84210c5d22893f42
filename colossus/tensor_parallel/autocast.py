"""torch.autocast sees no operator inside of an autograd function: ours do with their operands what it would do."""

from __future__ import annotations

import torch
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype | None:
    """In what `torch.autocast` takes a product of x; None outside of it, and of float64, which it leaves alone."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64 or not x.is_floating_point():
        return None
    return torch.get_autocast_dtype(device)


def to_product_dtype(x: Tensor) -> Tensor:
    """x as a product takes it; its gradient comes back in its own dtype."""
    dtype = product_dtype(x)
    return x if dtype is None else x.to(dtype)


def to_wide_dtype(x: Tensor) -> Tensor:
    """x as a loss takes it: in float32 where `torch.autocast` is enabled."""
    return x if product_dtype(x) is None else x.float()
