"""``colossus checkpoint convert``: weights in another form."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

from colossus.arithmetic import byte_count
from colossus.checkpoint.describe import printable
from colossus.checkpoint.durable import require_new
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.manifest import ITEM_BYTES, Manifest
from colossus.checkpoint.weight_sources import find_weights, open_weights
from colossus.cli.checkpoint_parsers import DTYPES
from colossus.cli.parser import path_of
from colossus.cli.progress import Progress
from colossus.registry import WEIGHT_WRITERS


def run(arguments: argparse.Namespace) -> int:
    """Write the weights of one folder as another.

    Raises:
        CheckpointError: when they cannot be read, or written so.
    """
    target, began = Path(arguments.dst).expanduser(), time.perf_counter()
    require_new(target)
    damaged: dict[Path, CheckpointError] = {}
    source = find_weights(path_of(arguments.src), damaged)
    for error in damaged.values():
        print(printable(f"damaged: {error}; {source} is taken"), file=sys.stderr)
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)  # copies, which more threads do not speed up
    with open_weights(source) as reader:
        checked = Progress(reader.manifest.num_bytes)
        reader.verify(on_block=checked.block)
        checked.end()
        dtype = DTYPES.get(arguments.dtype)
        total = _num_bytes(reader.manifest, dtype)
        written = Progress(total)
        try:
            WEIGHT_WRITERS.get(arguments.to)(
                reader,
                target,
                dtype=None if dtype is None else getattr(torch, dtype),
                max_shard_bytes=arguments.max_shard_size,
                on_tensor=written.file_done,
            )
        finally:
            written.end()
    seconds = time.perf_counter() - began
    print(printable(f"{target}: {byte_count(total)} of weights from {source}, in {seconds:.1f} s"))
    return 0


def _num_bytes(manifest: Manifest, dtype: str | None) -> int:
    """Of the weights, as they are to be written."""
    total = 0
    for name in manifest.names("model"):
        entry = manifest.tensors[f"model/{name}"]
        is_cast = dtype is not None and "float" in entry.dtype
        total += entry.num_bytes // ITEM_BYTES[entry.dtype] * ITEM_BYTES[dtype if is_cast and dtype else entry.dtype]
    return total
