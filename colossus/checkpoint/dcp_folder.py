"""Reading what is in a folder of ``torch.distributed.checkpoint``: names, shapes, and the places of tensors in files.

Its ``.metadata`` is a pickle: only the classes that describe tensors are read from it, so that a folder from elsewhere
runs no code. Optimizer state and other values are left.
"""

from __future__ import annotations

import importlib
import io
import pickle
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from colossus.checkpoint import torchtitan
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.checkpoint.manifest import ITEM_BYTES, FileEntry, Manifest, TensorEntry

METADATA = ".metadata"
#: what a ``.metadata`` may be made of
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "torch": {"Size", *ITEM_BYTES},
}  # fmt: skip
#: beginnings of keys that have no weights
_OTHERS = ("optim", "lr_scheduler", "dataloader", "train_state", "loops", "callbacks")
#: sections of a saved state in which a model's keys may be
_SECTIONS = ("model.", "state_dict.", "app.model.")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "pathlib":  # the folder's path when it was saved
            return PurePosixPath
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no tensor")
        return getattr(importlib.import_module(module), name)


def read_dcp(folder: Path) -> tuple[Manifest, dict[str, list[tuple[Any, Any]]], Mapping[str, int]]:
    """Return the manifest of a folder's weights, the chunks with their places in files, and the rows of heads, by key.

    The names are those of the saved model, without the section in which it was saved (``model.``), or ours for
    torchtitan's Llama. Only weights whose rows are in pairs have rows of heads, see `torchtitan.translate`.

    Raises:
        DamagedCheckpoint: a file is missing or shorter than its tensors, or the metadata cannot be understood.
        CheckpointError: it has no weights, or they are compressed.
    """
    path = folder / METADATA
    try:
        metadata: Any = _Unpickler(io.BytesIO(path.read_bytes())).load()
        described, places = dict(metadata.state_dict_metadata), dict(metadata.storage_data)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # a damaged pickle raises anything
        raise DamagedCheckpoint(f"{path}: cannot be understood: {type(error).__name__}: {error}") from None
    tensors = {key: entry for key, entry in described.items() if hasattr(entry, "chunks")}
    section = next((name for name in _SECTIONS if any(key.startswith(name) for key in tensors)), "")
    names = {key: key.removeprefix(section) for key in tensors if key.startswith(section)}
    names = {key: name for key, name in names.items() if section or not key.startswith(_OTHERS)}
    if not names:
        raise CheckpointError(f"{folder}: has no weights: its keys begin with {', '.join(sorted(described)[:3])}")
    translation = torchtitan.translate(folder, {name: tensors[key].size for key, name in names.items()})
    names = {key: translation.names[name] for key, name in names.items() if name in translation.names}
    by_place = {(index.fqn, tuple(index.offset or ())): info for index, info in places.items()}
    entries: dict[str, TensorEntry] = {}
    chunks: dict[str, list[tuple[Any, Any]]] = {}
    files: dict[str, int] = {}
    for key, name in names.items():
        dtype = str(tensors[key].properties.dtype).removeprefix("torch.")
        entries[f"model/{name}"] = TensorEntry(dtype, tuple(tensors[key].size), ())
        for chunk in tensors[key].chunks:
            info = by_place.get((key, tuple(chunk.offsets)))
            if info is None or not _FILE_NAME.fullmatch(str(info.relative_path)):
                raise DamagedCheckpoint(f"{path}: {key} at {list(chunk.offsets)} is in no file of the folder")
            if getattr(info, "transform_descriptors", None):
                raise CheckpointError(f"{folder}: {key} is compressed; save it without extensions")
            chunks.setdefault(f"model/{name}", []).append((chunk, info))
            files[info.relative_path] = max(files.get(info.relative_path, 0), info.offset + info.length)
    _require_files(folder, files)
    entries_of_files = {name: FileEntry(size, 0) for name, size in files.items()}
    plan = {"axes": {}, "text": "no plan: a folder of DCP"}
    manifest = Manifest(0, path.stat().st_mtime, {}, plan, {}, entries_of_files, entries)
    return manifest, chunks, {f"model/{name}": rows for name, rows in translation.head_rows.items()}


def _require_files(folder: Path, files: Mapping[str, int]) -> None:
    for name, size in files.items():
        try:
            num_bytes = (folder / name).stat().st_size
        except OSError as error:
            raise DamagedCheckpoint(f"{folder / name}: cannot be read: {error.strerror}") from None
        if num_bytes < size:
            raise DamagedCheckpoint(f"{folder / name}: has {num_bytes} bytes of {size}; take another checkpoint")
