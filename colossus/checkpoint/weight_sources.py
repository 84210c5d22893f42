"""Where weights come from: checkpoints, and the folders of others that `WEIGHT_FORMATS` names. No torch until one is
opened."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.folder import locate
from colossus.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from colossus.registry import WEIGHT_FORMATS

if TYPE_CHECKING:
    from colossus.checkpoint.reader import CheckpointReader


def find_weights(path: Path | str, damaged: dict[Path, CheckpointError] | None = None) -> Path:
    """The folder that a user means: a checkpoint, as `locate` finds it, or one of another format, which is checked.

    Args:
        damaged: those that are known not to be whole.

    Raises:
        CheckpointError: when there is none, or it is not whole.
    """
    path = Path(path).expanduser()
    foreign = _format_of(path)
    if foreign is None:
        return locate(path, damaged)
    if damaged is not None and path in damaged:
        raise damaged[path]
    foreign.manifest(path)
    return path


def open_weights(folder: Path | str) -> CheckpointReader:
    """A reader of what `find_weights` has found.

    Raises:
        CheckpointError: when it is not whole.
    """
    foreign = _format_of(Path(folder))
    if foreign is not None:
        reader: CheckpointReader = foreign.open(Path(folder))
        return reader
    opened: CheckpointReader = importlib.import_module("colossus.checkpoint.reader").CheckpointReader(folder)
    return opened


def manifest_of(folder: Path) -> Manifest:
    """What `find_weights` has found holds.

    Raises:
        CheckpointError: when it is not whole.
    """
    foreign = _format_of(folder)
    manifest: Manifest = read_manifest(folder) if foreign is None else foreign.manifest(folder)
    return manifest


def describe_weights(folder: Path) -> str:
    """What `find_weights` has found, in words."""
    foreign = _format_of(folder)
    return f"of step {read_manifest(folder).step}, {folder}" if foreign is None else f"of {foreign.title}, {folder}"


def _format_of(path: Path) -> Any:
    """None for what may be ours."""
    if (path / MANIFEST).exists():
        return None
    formats = (WEIGHT_FORMATS.get(name) for name in WEIGHT_FORMATS.names())
    return next((each for each in formats if each.recognises(path)), None)
