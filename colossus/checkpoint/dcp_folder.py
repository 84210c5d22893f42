"""Reading what is in a folder of ``torch.distributed.checkpoint``: names, shapes, and the places of tensors in files.

Its ``.metadata`` is a pickle: only the classes that describe tensors are read from it, so that a folder from elsewhere
runs no code. Optimizer state and other values are left.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.checkpoint.manifest import FILE_NAME, ITEM_BYTES, FileEntry, Manifest, TensorEntry
from colossus.checkpoint.megatron import megatron_places
from colossus.checkpoint.stored_place import StoredPlace
from colossus.checkpoint.torchtitan import torchtitan_places
from colossus.checkpoint.weight_sources import WeightFormat

METADATA = ".metadata"
#: what a ``.metadata`` may be made of
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    # the plans of all ranks, which Megatron-Core keeps beside
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
    },
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "torch": {"Size", *ITEM_BYTES},
}  # fmt: skip
#: beginnings of keys that have no weights
_OTHERS = ("optim", "chained_", "lr_scheduler", "dataloader", "train_state", "loops", "callbacks")
#: sections of a saved state in which a model's keys may be
_SECTIONS = ("model.", "state_dict.", "app.model.")


class _MegatronRecord:
    """Metadata or a plan of Megatron-Core, whose classes have no code that reading needs."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "pathlib":  # the folder's path when it was saved
            return PurePosixPath
        if module.startswith("megatron.core.dist_checkpointing."):
            return _MegatronRecord
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no tensor")
        return getattr(importlib.import_module(module), name)


class DCPFolder(NamedTuple):
    """A folder's weights.

    Attributes:
        manifest: the content by the names of the saved model, without the section in which it was saved (``model.``),
            or by ours for torchtitan's and Megatron's models.
        places: the places of its weights by key.
        chunks: the chunks of a stored tensor with their places in files, by the tensor's name.
    """

    manifest: Manifest
    places: dict[str, StoredPlace]
    chunks: dict[str, list[tuple[Any, Any]]]


def read_dcp(folder: Path) -> DCPFolder:
    """Return a folder's weights.

    Raises:
        DamagedCheckpoint: a file is missing or shorter than its tensors, or the metadata cannot be understood.
        CheckpointError: it has no weights, or they are compressed.
    """
    path = folder / METADATA
    try:
        metadata: Any = _Unpickler(io.BytesIO(path.read_bytes())).load()
        described, located = dict(metadata.state_dict_metadata), dict(metadata.storage_data)
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
    stored = {name: tensors[key] for key, name in names.items()}
    shapes = {name: tuple(tensor.size) for name, tensor in stored.items()}
    places = torchtitan_places(folder, shapes) or megatron_places(folder, shapes)
    places = places or {name: StoredPlace(name, shape) for name, shape in shapes.items()}
    read = {place.name for place in places.values()}
    by_place = {(index.fqn, tuple(index.offset or ())): info for index, info in located.items()}
    chunks: dict[str, list[tuple[Any, Any]]] = {}
    files: dict[str, int] = {}
    for key, name in names.items():
        for chunk in tensors[key].chunks if name in read else ():
            info = by_place.get((key, tuple(chunk.offsets)))
            if info is None or not FILE_NAME.fullmatch(str(info.relative_path)):
                raise DamagedCheckpoint(f"{path}: {key} at {list(chunk.offsets)} is in no file of the folder")
            if getattr(info, "transform_descriptors", None):
                raise CheckpointError(f"{folder}: {key} is compressed; save it without extensions")
            chunks.setdefault(name, []).append((chunk, info))
            files[info.relative_path] = max(files.get(info.relative_path, 0), info.offset + info.length)
    _require_files(folder, files)
    entries = {
        f"model/{name}": TensorEntry(str(stored[place.name].properties.dtype).removeprefix("torch."), place.shape, ())
        for name, place in places.items()
    }
    entries_of_files = {name: FileEntry(size, 0) for name, size in files.items()}
    plan = {"axes": {}, "text": "no plan: a folder of DCP"}
    manifest = Manifest(0, path.stat().st_mtime, {}, plan, {}, entries_of_files, entries)
    return DCPFolder(manifest, {f"model/{name}": place for name, place in places.items()}, chunks)


def _require_files(folder: Path, files: Mapping[str, int]) -> None:
    for name, size in files.items():
        try:
            num_bytes = (folder / name).stat().st_size
        except OSError as error:
            raise DamagedCheckpoint(f"{folder / name}: cannot be read: {error.strerror}") from None
        if num_bytes < size:
            raise DamagedCheckpoint(f"{folder / name}: has {num_bytes} bytes of {size}; take another checkpoint")


#: FSDP2, torchtitan and Lightning save in this format
DISTRIBUTED_CHECKPOINT = WeightFormat(
    title="a folder of torch.distributed.checkpoint",
    recognises=lambda path: (path / METADATA).is_file(),
    read=read_dcp,
    reader="colossus.checkpoint.dcp_reader:DCPReader",
)
