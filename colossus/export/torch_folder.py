"""A folder out of whatever weights are read from, with which torch alone runs the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from colossus.checkpoint.cast import read_cast, weight_dtype
from colossus.checkpoint.durable import naming, write_flushed
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.manifest import TOKENIZER_FILE
from colossus.checkpoint.natural_order import natural_order
from colossus.checkpoint.new_folder import new_folder
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.shards import MAX_SHARD_BYTES
from colossus.checkpoint.tensor_file import make_header, write_file
from colossus.export import torch_modules

#: the file of plain modules under its name in a folder
MODEL = "model.py"


def to_torch(
    reader: CheckpointReader,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_tensor: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write ``model.py`` (plain modules that import nothing but torch), ``config.json`` and ``model.safetensors``:

        import model
        m = model.load()

    No more than one parameter is held. The weights are one file, whatever ``max_shard_bytes`` says: what reads it
    reads one tensor after the other.

    Args:
        dtype: of the floating-point ones; None is that in which each is stored.
        on_tensor: called with the bytes of each that is written.

    Raises:
        CheckpointError: when the model is none of those in ``model.py``, the weights are not those of its config, or
            the target is there or cannot be written.
    """
    manifest = reader.manifest
    names = sorted(manifest.names("model"), key=natural_order)
    _require_known(reader, names)
    entries = {name: reader.entry(f"model/{name}") for name in names}
    wanted = [(name, weight_dtype(entry.dtype, dtype), entry.shape) for name, entry in entries.items()]
    config = {"model": manifest.config["model"], "tied": dict(manifest.aliases)}
    with new_folder(target) as folder:
        header = make_header(wanted)
        with naming(folder / torch_modules.WEIGHTS):
            write_file(folder / torch_modules.WEIGHTS, header, read_cast(reader, wanted, on_tensor))
        write_flushed(folder / torch_modules.CONFIG, json.dumps(config, indent=2).encode() + b"\n")
        write_flushed(folder / MODEL, Path(torch_modules.__file__).read_bytes())
        if manifest.tokenizer == TOKENIZER_FILE:
            shutil.copyfile(reader.folder / TOKENIZER_FILE, folder / TOKENIZER_FILE)


def _require_known(reader: CheckpointReader, names: list[str]) -> None:
    """That ``model.py`` builds this model, with these names and shapes."""
    spec: Any = reader.manifest.config.get("model")
    how = "colossus.plain(engine) gives a plain module of any model, in a run of its config"
    if not isinstance(spec, dict):
        raise CheckpointError(f"{reader.folder}: its manifest has no config, and so no model to write; {how}")
    try:
        with torch.device("meta"):
            model = torch_modules.build(spec)
    except (ValueError, KeyError, TypeError) as error:
        told = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{reader.folder}: its model cannot be written: {told}; {how}") from error
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    saved = {name: reader.entry(f"model/{name}").shape for name in names}
    saved |= {alias: saved[name] for alias, name in reader.manifest.aliases.items()}
    wrong = sorted(name for name in shapes.keys() | saved.keys() if shapes.get(name) != saved.get(name))
    if wrong:
        first = wrong[0]
        raise CheckpointError(
            f"{reader.folder}: {len(wrong)} of its tensors are not those of its config's {spec['type']}, "
            f"{first} say: {saved.get(first, 'none')} is saved, the model has {shapes.get(first, 'none')}; {how}"
        )
