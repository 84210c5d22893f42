"""Weights read in another dtype, and numbers that it has no room for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.tensor_file import DTYPES


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


def weight_dtype(stored: str, wanted: torch.dtype | None) -> torch.dtype:
    """Of a tensor that is written anew: the one that is wanted, but for integers, which stay as they are stored."""
    dtype = DTYPES[stored]
    return wanted if wanted is not None and dtype.is_floating_point else dtype


def read_cast(
    reader: CheckpointReader,
    wanted: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
    on_tensor: Callable[[int], None],
) -> Iterator[Tensor]:
    """Parameters and buffers one after the other, as (name, dtype, shape) say; no more than one is held.

    Args:
        on_tensor: called with the bytes of each once it was used.
    """
    for name, dtype, shape in wanted:
        key, out = f"model/{name}", torch.empty(shape, dtype=dtype)
        reader.read_box(key, tuple((0, size) for size in shape), out)
        require_finite(out, name, partial(reader.tensor, key))
        yield out
        on_tensor(out.nbytes)
        del out
