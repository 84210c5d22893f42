"""What of another folder goes with weights that are written. No torch."""

from __future__ import annotations

from pathlib import Path

from colossus.checkpoint.companions import COMPANIONS, Companions, read_companions
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.folder import locate
from colossus.checkpoint.manifest import MANIFEST, read_manifest
from colossus.hf.contents import beside_of
from colossus.hf.folder import CONFIG, read_json


def companions_like(folder: Path) -> Companions:
    """Of a model folder of Hugging Face, which needs no weights; of a checkpoint, a folder of them or a run folder.

    Raises:
        CheckpointError: there is none.
    """
    if not folder.is_dir():
        raise CheckpointError(f"like = {str(folder)!r}: there is no such folder")
    if not (folder / MANIFEST).exists():
        config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
        if "model_type" in config or any((folder / name).is_file() for name in COMPANIONS):
            return read_companions(folder, beside_of(config))
    try:
        found = locate(folder)
    except CheckpointError as error:
        raise CheckpointError(f"like = {str(folder)!r}: {error}") from None
    return read_companions(found, read_manifest(found).config)
