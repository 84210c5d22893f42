"""Where a model's weights are: a checkpoint of ours, or a folder of Hugging Face. No torch."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.folder import locate
from colossus.checkpoint.manifest import MANIFEST, Manifest, read_manifest

#: how a manifest names a tokenizer.json in the folder
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class Source:
    """What is loaded.

    Attributes:
        folder: of the checkpoint itself.
        manifest: what is in it.
        is_hf: whether it is a folder of Hugging Face.
    """

    folder: Path
    manifest: Manifest
    is_hf: bool = False

    @property
    def model(self) -> Mapping[str, Any]:
        """The section ``model`` of the run's config; empty where there was none."""
        return self.manifest.config.get("model") or {}

    @property
    def tokenizer(self) -> str | None:
        """How text became tokens, as the manifest has it: "bytes", "tokenizer.json", or None."""
        recorded: str | None = getattr(self.manifest, "tokenizer", None)
        if recorded is None and self.is_hf and (self.folder / TOKENIZER_FILE).is_file():
            return TOKENIZER_FILE
        return recorded

    def open(self) -> Any:
        """A reader of its weights, to be used in a ``with``. Imports torch."""
        return _reader_class(self.is_hf)(self.folder)


def find_source(path: Path | str) -> Source:
    """The model that a user means: a checkpoint, a folder of them, a run folder, or a folder of Hugging Face.

    Raises:
        CheckpointError: when there is none, or it is not whole.
    """
    path = Path(path).expanduser()
    if is_hf_folder(path):
        with _reader_class(is_hf=True)(path) as reader:
            return Source(path, reader.manifest, is_hf=True)
    found = locate(path)
    return Source(found, read_manifest(found))


def is_hf_folder(path: Path) -> bool:
    """Whether its config.json is one of Hugging Face: a run folder of ours has a file of that name, too."""
    if (path / MANIFEST).exists():
        return False
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "model_type" in config


def _reader_class(is_hf: bool) -> Any:
    if not is_hf:
        return importlib.import_module("colossus.checkpoint.reader").CheckpointReader
    try:
        return importlib.import_module("colossus.hf.reader").HFReader
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"this is a folder of Hugging Face, which needs the module {error.name}: pip install colossus[hf]"
        ) from error
