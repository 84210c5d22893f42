"""A model folder of Hugging Face out of whatever weights are read from: no processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.state_dict import WholeTensor
from colossus.checkpoint.tensor_file import DTYPES
from colossus.checkpoint.weight_sources import read_assets
from colossus.checkpoint.weights_only import MAX_SHARD_BYTES
from colossus.hf.hf_writer import plan_folder, write_folder
from colossus.registry import MODEL_OPTIONS


def to_hf(
    reader: CheckpointReader,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_tensor: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write the weights that a reader has as a model folder; see `colossus.hf.save`.

    Raises:
        CheckpointError: when the model is none of Hugging Face's that colossus writes, the target is there, or cannot
            be written.
    """
    manifest = reader.manifest
    spec = dict(manifest.config.get("model") or {})
    kind = str(spec.pop("type", "model that its checkpoint says nothing of"))
    options = None
    if kind in MODEL_OPTIONS:
        try:
            options = MODEL_OPTIONS.get(kind)(**spec)
        except ValidationError as error:
            raise CheckpointError(f"{reader.folder}: its model cannot be understood: {error}") from None
    known = {
        name: WholeTensor({name: (0, 0)}, entry.shape, DTYPES[entry.dtype])
        for name in manifest.names("model")
        for entry in (reader.entry(f"model/{name}"),)
    }
    beside = read_assets(reader.folder, manifest.config)
    plan = plan_folder(kind, options, known, dtype, max_shard_bytes, beside)

    def parts() -> Iterator[tuple[str, Tensor]]:
        for name in plan.part_names:
            yield name, reader.tensor(f"model/{name}")

    write_folder(target, plan, parts(), on_tensor=on_tensor)
