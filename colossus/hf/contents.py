"""A model folder of Hugging Face as the manifest of a checkpoint. No torch."""

from __future__ import annotations

from colossus.checkpoint.manifest import FileEntry, Manifest, TensorEntry
from colossus.hf.folder import HFFolder


def manifest_of(folder: HFFolder) -> Manifest:
    """What a folder holds, by our names: tensors without chunks, files without checksums."""
    config = {"model": dict(folder.spec)}
    if folder.token_ids:
        config["token_ids"] = dict(folder.token_ids)
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
