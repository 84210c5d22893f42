"""Numbers that a narrower dtype has no room for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from colossus.checkpoint.errors import CheckpointError


def require_finite(cast: Tensor, name: str, original: Tensor | Callable[[], Tensor]) -> None:
    """That a cast has made infinity of no number.

    Args:
        original: what was cast; a function of it is asked only where something is not finite.

    Raises:
        CheckpointError: naming the tensor, its largest number, and a dtype that has room for it.
    """
    if not cast.dtype.is_floating_point or cast.isfinite().all():
        return
    before = original if isinstance(original, Tensor) else original()
    lost = before.isfinite() & ~cast.isfinite()
    if lost.any():
        largest, dtype = before[lost].abs().max().item(), str(cast.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{name}: has {largest:g}, and {dtype} ends at {torch.finfo(cast.dtype).max:g}: it would be infinity; take "
            f"bf16 (--dtype bf16, dtype=torch.bfloat16), or the dtype in which it is stored"
        )
