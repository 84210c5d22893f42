"""The writer of folders of ``torch.distributed.checkpoint``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from colossus.checkpoint.durable import new_folder
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.weights_only import MAX_SHARD_BYTES, require_finite


def to_dcp(
    reader: CheckpointReader,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_tensor: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write the parameters and buffers of a reader as a folder that ``torch.distributed.checkpoint.load`` reads.

    Keys are those of the plain torch module, also for tied weights. All weights are in memory at once, as DCP needs
    them.

    Args:
        reader: reader of the weights.
        target: the new folder.
        dtype: dtype of the floating-point ones; None keeps the stored one of each.
        max_shard_bytes: not used; DCP writes a file for each process.
        on_tensor: called with the bytes of each tensor that is read.
    """
    state: dict[str, Tensor] = {}
    for name in reader.manifest.names("model"):
        value = original = reader.tensor(f"model/{name}")
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
            require_finite(value, name, original)
        state[name] = value
        on_tensor(original.nbytes)
    state |= {alias: state[name] for alias, name in reader.manifest.aliases.items() if name in state}
    with new_folder(target) as folder:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
