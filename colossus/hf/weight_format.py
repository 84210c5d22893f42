"""Model folders of Hugging Face as a format of weights. No torch until one is opened."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from colossus.checkpoint.manifest import Manifest
from colossus.hf.hf_folder import read_folder
from colossus.hf.model_config import is_hf_folder


class HuggingFace:
    """What `colossus.checkpoint.weight_sources` asks of a format of weights."""

    title = "a model folder of Hugging Face"

    @staticmethod
    def recognises(path: Path) -> bool:
        return is_hf_folder(path)

    @staticmethod
    def manifest(path: Path) -> Manifest:
        """What it holds; a CheckpointError says why it cannot be read."""
        return read_folder(path).manifest

    @staticmethod
    def open(path: Path) -> Any:
        return importlib.import_module("colossus.hf.hf_reader").HFReader(path)
