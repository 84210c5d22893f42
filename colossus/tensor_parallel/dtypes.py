"""The dtypes of our own operators: torch.autocast sees no operator inside an autograd function.

These functions do for our operators what autocast does for torch's, and what a run's
`colossus.context.precision.Precision` requires beyond it: activations between products in its dtype, and weights cast
before they travel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from colossus.context.precision import LOW, Precision
from colossus.layout.parameter import spec_of


def product_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype in which `torch.autocast` takes a product of x, None outside it and for float64."""
    device = x.device.type
    if device == "meta":  # autocast does not know this device
        return None
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64 or not x.is_floating_point():
        return None
    return torch.get_autocast_dtype(device)


def to_product_dtype(x: Tensor) -> Tensor:
    """Return x in the dtype of a product; its gradient comes back in its own dtype."""
    dtype = product_dtype(x)
    return x if dtype is None else x.to(dtype)


def activation_dtype(weight: Tensor, precision: Precision) -> torch.dtype:
    """Return the dtype of a table's rows as activations: that of products in a low-precision run, else the table's.

    To `torch.autocast` a table is no operand of a product; it stays wide where a user has turned autocast off.
    """
    narrow = precision.is_low and product_dtype(weight) is not None
    return precision.compute if narrow else spec_of(weight).computed_dtype or weight.dtype


def to_wide_dtype(x: Tensor) -> Tensor:
    """Return x for a loss or a norm: in float32 if it is of low precision, or `torch.autocast` is enabled."""
    return x.float() if x.dtype in LOW or product_dtype(x) is not None else x


def gradient_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of ``weight.grad``: that of the weight, unless it declares another."""
    if torch.compiler.is_compiling():  # a compiler cannot trace ``grad_dtype``
        return spec_of(weight).gradient_dtype or weight.dtype
    return weight.grad_dtype or weight.dtype


def set_gradient_dtype(weight: Tensor, dtype: torch.dtype) -> None:
    """Let ``weight.grad`` have a dtype of its own."""
    weight.grad_dtype = dtype
    spec_of(weight).gradient_dtype = dtype
