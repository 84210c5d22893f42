"""A model folder of Hugging Face as the manifest of a checkpoint. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colossus.checkpoint.companions import LABELS, TOKEN_IDS
from colossus.checkpoint.manifest import FileEntry, Manifest, TensorEntry
from colossus.hf.folder import HFFolder

#: as ``config.json`` has them
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
CLASS_NAMES = ("id2label", "label2id")


def beside_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a ``config.json`` is none of the model's: ids of special tokens, names of classes."""
    ids = {key: config[key] for key in SPECIAL_TOKENS if config.get(key) is not None}
    names = {key: config[key] for key in CLASS_NAMES if isinstance(config.get(key), Mapping) and config[key]}
    return ({TOKEN_IDS: ids} if ids else {}) | ({LABELS: names} if names else {})


def manifest_of(folder: HFFolder) -> Manifest:
    """What a folder holds, by our names: tensors without chunks, files without checksums."""
    config = {"model": dict(folder.spec)}
    config |= beside_of(folder.config)
    return Manifest(
        step=0,
        saved_at=(folder.path / "config.json").stat().st_mtime,
        versions=folder.versions,
        plan={"text": f"a folder of Hugging Face ({folder.family.model_type})"},
        config=config,
        files={name: FileEntry(size, 0) for name, size in folder.files.items()},
        tensors={
            f"model/{part.name}": TensorEntry(placed.stored.dtype, part.shape, ())
            for placed in folder.placed
            for part in placed.tensor.parts
        },
        aliases=folder.family.aliases(folder.options),
        tokenizer=folder.tokenizer,
    )
