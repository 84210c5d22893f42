"""Where a model's weights are: a checkpoint of ours, or a folder of Hugging Face. No torch for ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colossus.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from colossus.checkpoint.sources import find_weights, open_weights


@dataclass(frozen=True)
class Source:
    """What is loaded.

    Attributes:
        folder: of the checkpoint itself.
        manifest: what is in it.
    """

    folder: Path
    manifest: Manifest

    @property
    def is_foreign(self) -> bool:
        """Whether it is a folder of Hugging Face."""
        return not (self.folder / MANIFEST).exists()

    @property
    def model(self) -> Mapping[str, Any]:
        """The section ``model`` of the run's config; empty where there was none."""
        return self.manifest.config.get("model") or {}

    @property
    def token_ids(self) -> Mapping[str, Any]:
        """``eos_token_id`` and the like, of a model that came from Hugging Face."""
        return self.manifest.config.get("token_ids") or {}

    @property
    def tokenizer(self) -> str | None:
        """How text became tokens, as the manifest has it: "bytes", "tokenizer.json", or None."""
        return self.manifest.tokenizer


def find_source(path: Path | str) -> Source:
    """The model that a user means: a checkpoint, a folder of them, a run folder, or a folder of Hugging Face.

    Raises:
        CheckpointError: when there is none, or it is not whole.
    """
    found = find_weights(path)
    if (found / MANIFEST).exists():
        return Source(found, read_manifest(found))
    with open_weights(found) as reader:
        return Source(found, reader.manifest)
