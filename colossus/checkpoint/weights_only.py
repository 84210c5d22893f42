"""A checkpoint that has weights alone: what a run begins with (``checkpoint.weights``), not what one goes on from."""

from __future__ import annotations

import platform
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch

from colossus import __version__
from colossus.checkpoint.assets import read_assets, write_assets
from colossus.checkpoint.cast import read_cast, weight_dtype
from colossus.checkpoint.durable import naming, write_flushed
from colossus.checkpoint.manifest import MANIFEST, Chunk, FileEntry, Manifest, TensorEntry
from colossus.checkpoint.new_folder import new_folder
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.shards import MAX_SHARD_BYTES, split_into_shards
from colossus.checkpoint.tensor_file import DTYPES, dtype_name, make_header, write_file


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

    Raises:
        CheckpointError: when the target is there, or cannot be written.
    """
    entries = {
        name: TensorEntry(dtype_name(weight_dtype(entry.dtype, dtype)), entry.shape, ())
        for name in reader.manifest.names("model")
        for entry in (reader.entry(f"model/{name}"),)
    }
    shards = split_into_shards(entries, lambda name: entries[name].num_bytes, max_shard_bytes)
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    with new_folder(target) as folder:
        for number, names in enumerate(shards, 1):
            file = f"weights-{number:05d}.safetensors"
            wanted = [(name, DTYPES[entries[name].dtype], entries[name].shape) for name in names]
            header = make_header([(f"model/{name}", of_file, shape) for name, of_file, shape in wanted])
            with naming(folder / file):
                crc = write_file(folder / file, header, read_cast(reader, wanted, on_tensor))
            files[file] = FileEntry(header.num_bytes, crc)
            for name, of_file, shape in wanted:
                chunk = Chunk(file, header.offsets[f"model/{name}"], (0,) * len(shape), shape)
                tensors[f"model/{name}"] = TensorEntry(dtype_name(of_file), shape, (chunk,))
        source = reader.manifest
        beside = read_assets(reader.folder, source.config).files
        write_assets(beside, folder)
        files |= {name: FileEntry(len(data), zlib.crc32(data)) for name, data in beside.items()}
        manifest = Manifest(
            step=source.step,
            saved_at=time.time(),
            versions={"colossus": __version__, "torch": torch.__version__, "python": platform.python_version()},
            plan={"axes": {}, "text": f"no plan: weights only, converted from {reader.folder.name}", "num_ranks": 1},
            config=source.config,
            files=files,
            tensors=tensors,
            aliases=source.aliases,
            tokenizer=source.tokenizer,
        )
        write_flushed(folder / MANIFEST, manifest.to_bytes())
