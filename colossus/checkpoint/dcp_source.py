"""Folders of ``torch.distributed.checkpoint`` as weights: FSDP2, torchtitan and Lightning save in this format."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from colossus.checkpoint.dcp_folder import METADATA, read_dcp
from colossus.checkpoint.manifest import Manifest


class DistributedCheckpoint:
    """The format of weights that `colossus.checkpoint.weight_sources` calls for a folder of DCP."""

    title = "a folder of torch.distributed.checkpoint"

    @staticmethod
    def recognises(path: Path) -> bool:
        return (path / METADATA).is_file()

    @staticmethod
    def manifest(path: Path) -> Manifest:
        """Return the folder's content, or raise a CheckpointError that says why it cannot be read."""
        return read_dcp(path).manifest

    @staticmethod
    def open(path: Path) -> Any:
        return importlib.import_module("colossus.checkpoint.dcp_reader").DCPReader(path)
