"""A checkpoint that has weights alone: what a run begins with (``checkpoint.weights``), not what one goes on from."""

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
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.tensor_box import TensorBox
from colossus.checkpoint.tensor_file import DTYPES, dtype_name
from colossus.checkpoint.weight_sources import read_assets, write_assets
from colossus.checkpoint.writer import write_boxes

T = TypeVar("T")

#: what Hugging Face's tools split at
MAX_SHARD_BYTES = 5 * 10**9


def to_colossus(
    reader: CheckpointReader,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_tensor: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write the parameters and buffers that a reader has as a checkpoint; no more than one of them is held.

    Args:
        dtype: of the floating-point ones; None is that in which each is stored.
        max_shard_bytes: of one file, unless a single tensor is larger.
        on_tensor: called with the bytes of each that is written.
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
            boxes = [
                TensorBox.whole(key, torch.empty(each.shape, dtype=DTYPES[each.dtype], device="meta"))
                for key, each in wanted.items()
            ]
            part = write_boxes(folder / file, boxes, _read_cast(reader, wanted, on_tensor))
            parts.append(part | {"values": {}, "aliases": source.aliases})
        plan = {"axes": {}, "text": f"no plan: weights only, converted from {reader.folder.name}", "num_ranks": 1}
        beside = read_assets(reader.folder, source.config).files
        write_assets(beside, folder)
        manifest = merge(parts, About(source.step, plan, source.config, source.tokenizer, beside))
        write_flushed(folder / MANIFEST, manifest.to_bytes())


def _read_cast(
    reader: CheckpointReader, wanted: dict[str, TensorEntry], on_tensor: Callable[[int], None]
) -> Iterator[Tensor]:
    """Whole parameters and buffers one after the other, each in its dtype; no more than one is held."""
    for key, entry in wanted.items():
        out = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        reader.read_box(key, tuple((0, size) for size in entry.shape), out)
        require_finite(out, key.removeprefix("model/"), partial(reader.tensor, key))
        yield out
        on_tensor(out.nbytes)
        del out


def require_finite(cast: Tensor, name: str, original: Tensor | Callable[[], Tensor]) -> None:
    """That a cast has made infinity of no number.

    Args:
        original: what was cast; a function of it is asked only where something is not finite.
    """
    if not cast.dtype.is_floating_point or cast.isfinite().all():
        return
    before = original if isinstance(original, Tensor) else original()
    if (before.isfinite() & ~cast.isfinite()).any():
        raise CheckpointError(
            f"{name}: has numbers above {torch.finfo(cast.dtype).max:g}, where {dtype_name(cast.dtype)} ends: they "
            f"would be infinity; take bf16 (--dtype bf16, dtype=torch.bfloat16), or the dtype in which it is stored"
        )


def split_into_shards(items: Iterable[T], num_bytes: Callable[[T], int], most: int) -> list[list[T]]:
    """The items in their order, a new shard begun where one would grow beyond ``most``; a larger item is one alone."""
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
