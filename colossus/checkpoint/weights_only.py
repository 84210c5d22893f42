"""A checkpoint with weights alone: a run can begin with it (``checkpoint.weights``), but not resume from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from colossus.checkpoint.durable import new_folder, write_flushed
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.manifest import MANIFEST, About, TensorEntry, merge
from colossus.checkpoint.part import Part, write_parts
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.tensor_file import DTYPES, dtype_name
from colossus.checkpoint.weight_sources import read_assets, write_assets

T = TypeVar("T")

#: default limit of a file in Hugging Face's tools
MAX_SHARD_BYTES = 5 * 10**9


def to_colossus(
    reader: CheckpointReader,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_tensor: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write the parameters and buffers of a reader as a checkpoint, with no more than one of them in memory.

    Args:
        reader: reader of the weights.
        target: folder of the new checkpoint.
        dtype: dtype of the floating-point ones; None keeps the stored one of each.
        max_shard_bytes: largest size of a file, unless a single tensor is larger.
        on_tensor: called with the bytes of each tensor that is written.
    """
    source, parts = reader.manifest, []
    entries = {key: entry for key, entry in source.tensors.items() if key.startswith("model/")}
    if dtype is not None:
        floats = {key: entry for key, entry in entries.items() if DTYPES[entry.dtype].is_floating_point}
        entries |= {key: replace(entry, dtype=dtype_name(dtype)) for key, entry in floats.items()}
    with new_folder(target) as folder:
        shards = split_into_shards(entries, lambda key: entries[key].num_bytes, max_shard_bytes)
        for number, keys in enumerate(shards, 1):
            file = f"weights-{number:05d}.safetensors"
            wanted = {key: entries[key] for key in keys}
            weights = [
                Part.whole(key, torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta"))
                for key, entry in wanted.items()
            ]
            part = write_parts(folder / file, weights, _read_cast(reader, wanted, on_tensor))
            parts.append(part | {"values": {}, "aliases": source.aliases})
        plan = {"axes": {}, "text": f"no plan: weights only, converted from {reader.folder.name}", "num_ranks": 1}
        assets = read_assets(reader.folder, source.config).files
        write_assets(assets, folder)
        manifest = merge(parts, About(source.step, plan, source.config, source.tokenizer, assets))
        write_flushed(folder / MANIFEST, manifest.to_bytes())


def _read_cast(
    reader: CheckpointReader, wanted: dict[str, TensorEntry], on_tensor: Callable[[int], None]
) -> Iterator[Tensor]:
    """Yield whole parameters and buffers one after the other, each in its dtype, with no more than one in memory."""
    for key, entry in wanted.items():
        out = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        reader.read_box(key, tuple((0, size) for size in entry.shape), out)
        require_finite(out, key.removeprefix("model/"), partial(reader.tensor, key))
        yield out
        on_tensor(out.nbytes)
        del out


def require_finite(cast: Tensor, name: str, original: Tensor | Callable[[], Tensor]) -> None:
    """Raise `CheckpointError` if a cast has turned a number into infinity.

    Args:
        cast: the tensor after the cast.
        name: its name, for the message.
        original: the tensor before the cast, or a function that returns it and is called only if it is needed.
    """
    if not cast.dtype.is_floating_point or cast.isfinite().all():
        return
    before = original if isinstance(original, Tensor) else original()
    if (before.isfinite() & ~cast.isfinite()).any():
        raise CheckpointError(
            f"{name}: has numbers above {torch.finfo(cast.dtype).max:g}, the largest of {dtype_name(cast.dtype)}: they "
            f"would be infinity; use bf16 (--dtype bf16, dtype=torch.bfloat16), or the dtype in which it is stored"
        )


def split_into_shards(items: Iterable[T], num_bytes: Callable[[T], int], most: int) -> list[list[T]]:
    """Return the items in their order, in shards of at most ``most`` bytes; a larger item has its own shard."""
    shards: list[list[T]] = []
    filled = 0
    for item in items:
        size = num_bytes(item)
        if not shards or filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += size
    return shards
