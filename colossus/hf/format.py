"""Model folders of Hugging Face as a place that weights come from. No torch until one is opened."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from colossus.checkpoint.manifest import Manifest
from colossus.hf.contents import manifest_of
from colossus.hf.folder import is_hf_folder, read_folder


class HuggingFace:
    """What `colossus.checkpoint.sources` asks of a format."""

    title = "a model folder of Hugging Face"

    @staticmethod
    def recognises(path: Path) -> bool:
        return is_hf_folder(path)

    @staticmethod
    def check(path: Path) -> None:
        """That it can be read; a CheckpointError says why not."""
        read_folder(path)

    @staticmethod
    def manifest(path: Path) -> Manifest:
        return manifest_of(read_folder(path))

    @staticmethod
    def open(path: Path) -> Any:
        return importlib.import_module("colossus.hf.reader").HFReader(path)
