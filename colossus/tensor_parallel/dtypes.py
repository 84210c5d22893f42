"""In what our own operators compute: torch.autocast sees no operator inside of an autograd function.

They do with their operands what autocast does with torch's, and what a run's `colossus.context.precision.Precision`
asks for beyond it: activations between products in its dtype, and weights cast before they travel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from colossus.context.precision import LOW, Precision
from colossus.layout.parameter import spec_of


def product_dtype(x: Tensor) -> torch.dtype | None:
    """In what `torch.autocast` takes a product of x; None outside of it, and of float64, which it leaves alone."""
    device = x.device.type
    if device == "meta":  # of which autocast knows nothing
        return None
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64 or not x.is_floating_point():
        return None
    return torch.get_autocast_dtype(device)


def to_product_dtype(x: Tensor) -> Tensor:
    """X as a product takes it; its gradient comes back in its own dtype."""
    dtype = product_dtype(x)
    return x if dtype is None else x.to(dtype)


def activation_dtype(weight: Tensor, precision: Precision) -> torch.dtype:
    """In what a table's rows become activations: that of products in a run of low precision, else the table's.

    A table is no operand of a product to `torch.autocast`, and stays wide where a user has turned it off.
    """
    narrow = precision.is_low and product_dtype(weight) is not None
    return precision.compute if narrow else spec_of(weight).computed_dtype or weight.dtype


def to_wide_dtype(x: Tensor) -> Tensor:
    """X as a loss or a norm takes it: in float32 where it is of low precision, or `torch.autocast` is enabled."""
    return x.float() if x.dtype in LOW or product_dtype(x) is not None else x


def gradient_dtype(weight: Tensor) -> torch.dtype:
    """Of ``weight.grad``: that of the weight, unless it says otherwise."""
    if torch.compiler.is_compiling():  # which cannot trace ``grad_dtype``
        return spec_of(weight).gradient_dtype or weight.dtype
    return weight.grad_dtype or weight.dtype


def set_gradient_dtype(weight: Tensor, dtype: torch.dtype) -> None:
    """Let ``weight.grad`` have a dtype of its own."""
    weight.grad_dtype = dtype
    spec_of(weight).gradient_dtype = dtype
