"""Features that differ between versions of torch, looked up once, when this is imported.

Developed and tested with torch 2.13; 2.11 lacks some features, for which this has replacements. No other file reads
torch's version.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import distributed as dist


def first_of(owner: Any, *names: str) -> Any:
    """Return the first of these attributes that ``owner`` has, or None."""
    return next((getattr(owner, name) for name in names if hasattr(owner, name)), None)


#: torch 2.13 renamed these and warns about the old names
all_gather_single: Any = first_of(dist, "all_gather_single", "all_gather_into_tensor")
reduce_scatter_single: Any = first_of(dist, "reduce_scatter_single", "reduce_scatter_tensor")
#: packs a tensor for backward at once; None: torch packs only at the end of a forward
make_saved_tensor: Any = first_of(torch._C._autograd, "_make_saved_tensor")
#: multiplies rows by the weight of their group; None: torch has no such kernel
grouped_mm: Any = first_of(torch, "_grouped_mm")
#: True if a batch norm may have a weight without a bias
batch_norm_has_bias = "bias" in inspect.signature(torch.nn.BatchNorm1d).parameters
_INPLACE: Any = first_of(torch.Tag, "inplace")


def is_inplace(func: Any) -> bool:
    """Return whether an operation of ATen writes to its first argument and returns it, as ``add_`` does."""
    return func._schema.name.endswith("_") if _INPLACE is None else _INPLACE in func.tags
