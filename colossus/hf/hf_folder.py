"""A model folder of Hugging Face: its config as our model, its tensors found and checked. No torch.

Everything that can be wrong is found from ``config.json`` and the headers of the files, before a process starts.
"""

from __future__ import annotations

import fnmatch
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.checkpoint.manifest import (
    ITEM_BYTES,
    SAFETENSORS_DTYPES,
    TOKENIZER_FILE,
    FileEntry,
    Manifest,
    TensorEntry,
)
from colossus.hf.family import Family, Row
from colossus.hf.model_config import CONFIG, INDEX, SINGLE, beside_of, options_of, read_json, spec_of

#: what safetensors calls a dtype -> torch's name
_DTYPES = {code: name for name, code in SAFETENSORS_DTYPES.items() if not name.startswith("complex")}
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_FLOATS = ("float64", "float32", "float16", "bfloat16")
#: names that an error lists of each kind
_MOST_LISTED = 4


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, row-major.

    Attributes:
        dtype: by torch's name.
        offset: of its first byte in the file.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Placed:
    """Where a tensor of theirs is, and which."""

    tensor: Row
    stored: StoredTensor


@dataclass(frozen=True)
class HFFolder:
    """A model folder whose tensors are those that its config tells of.

    Attributes:
        path: of the folder.
        placed: in the order of the model.
        manifest: what it holds, by our names: tensors without chunks, files without checksums, the model's options.
    """

    path: Path
    placed: Sequence[Placed]
    manifest: Manifest


def read_folder(path: Path) -> HFFolder:
    """A model folder, all of whose tensors are there, in the shapes of its config, and no others.

    Raises:
        DamagedCheckpoint: a file is missing, truncated, or not what it is called.
        CheckpointError: the model is none that colossus has, or its tensors are others.
    """
    config = read_json(path / CONFIG)
    family, spec = spec_of(path, config, {})
    options = options_of(spec)
    stored = _stored(path)
    if options.num_layers > len(stored):
        raise CheckpointError(
            f"{path / CONFIG}: says {options.num_layers} layers, the files have {len(stored)} tensors"
        )
    placed = _place(path, family, family.tensors(options), stored)
    written_by = config.get("transformers_version")
    files = sorted({each.file for each in stored.values()})
    manifest = Manifest(
        step=0,
        saved_at=(path / CONFIG).stat().st_mtime,
        versions={"transformers": written_by} if isinstance(written_by, str) else {},
        plan={"text": f"a folder of Hugging Face ({family.model_type})"},
        config={"model": {"type": spec["type"], **options.model_dump()}, **beside_of(config)},
        files={name: FileEntry((path / name).stat().st_size, 0) for name in files},
        tensors={
            f"model/{part.name}": TensorEntry(each.stored.dtype, part.shape, ())
            for each in placed
            for part in each.tensor.parts
        },
        aliases=family.aliases(options),
        tokenizer=TOKENIZER_FILE if (path / TOKENIZER_FILE).is_file() else None,
    )
    return HFFolder(path, placed, manifest)


def _stored(path: Path) -> dict[str, StoredTensor]:
    """All tensors by name."""
    if (path / SINGLE).exists():
        return _header(path, SINGLE)
    if not (path / INDEX).exists():
        raise CheckpointError(f"{path}: {_without_weights(path)}")
    by_name = read_json(path / INDEX).get("weight_map")
    if not isinstance(by_name, dict) or not by_name:
        raise DamagedCheckpoint(f"{path / INDEX}: has no weight_map")
    stored: dict[str, StoredTensor] = {}
    for file in sorted({str(file) for file in by_name.values()}):
        if not _FILE_NAME.fullmatch(file):
            raise DamagedCheckpoint(f"{path / INDEX}: names a file {file!r}, which is no plain file name")
        stored |= {name: tensor for name, tensor in _header(path, file).items() if by_name.get(name) == file}
    if lost := [name for name in by_name if name not in stored]:
        raise DamagedCheckpoint(f"{path / INDEX}: says that {lost[0]} is in {by_name[lost[0]]}, where it is not")
    return stored


def _header(folder: Path, name: str) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name, which the library has found whole: all bytes belong to one each.

    Raises:
        DamagedCheckpoint: it is missing, truncated, or no safetensors file.
        CheckpointError: it cannot be read.
    """
    path = folder / name
    if not path.is_file():
        raise DamagedCheckpoint(f"{path}: {'is no file' if path.exists() else 'is missing'}")
    try:
        with safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(length))
    except SafetensorError as error:
        raise DamagedCheckpoint(f"{path}: is truncated or changed, or no safetensors file: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    found = {}
    for key, entry in entries.items():
        if key != "__metadata__":
            dtype, offset = _DTYPES.get(entry["dtype"], entry["dtype"]), 8 + length + entry["data_offsets"][0]
            found[key] = StoredTensor(name, dtype, tuple(entry["shape"]), offset)
    return found


def _without_weights(path: Path) -> str:
    inside = sorted(each.name for each in path.iterdir())
    for name in inside:
        if name.endswith((".bin", ".pt", ".pth", ".h5", ".msgpack", ".ckpt")):
            return (
                f"has {name} and no {SINGLE}: a pickle can run code, so colossus opens none. Convert it once with "
                f"transformers, if you trust it: AutoModel...from_pretrained(folder).save_pretrained(new_folder, "
                f"safe_serialization=True)"
            )
    others = [name for name in inside if name.endswith(".safetensors")]
    more = f"; it has {listed(others)}" if others else ""
    return f"has neither {SINGLE} nor {INDEX}{more}"


def _place(path: Path, family: Family, tensors: Sequence[Row], stored: Mapping[str, StoredTensor]) -> list[Placed]:
    """Each tensor of the model where it is.

    Raises:
        CheckpointError: naming what is missing, left over, of another shape or dtype.
    """
    placed: list[Placed] = []
    used: set[str] = set()
    missing: list[str] = []
    wrong: list[str] = []
    different: list[tuple[str, str]] = []
    for tensor in tensors:
        known = dict.fromkeys((tensor.name, tensor.name.removeprefix(family.prefix), *tensor.other_names))
        there_are = [name for name in known if name in stored]
        used.update(known)
        if not there_are:
            missing += [] if tensor.may_be_missing else [tensor.name]
            continue
        found, *copies = there_are
        different += [(found, copy) for copy in copies if not _are_equal(path, stored[found], stored[copy])]
        there = stored[found]
        if there.shape != tensor.shape:
            wrong.append(f"{found} has shape {list(there.shape)}, {CONFIG} says {list(tensor.shape)}")
        elif there.dtype not in _FLOATS:
            wrong.append(f"{found} has dtype {there.dtype}, which are no weights that can be trained")
        placed.append(Placed(tensor, there))
    extra = [
        name
        for name in stored
        if name not in used and not any(fnmatch.fnmatchcase(name, pattern) for pattern in family.ignored)
    ]
    problems = wrong[:_MOST_LISTED]
    for title, names in (("missing", missing), (f"not in a {family.model_type}", extra)):
        problems += [f"{len(names)} {title}: {listed(names)}"] if names else []
    problems += [
        f"{first} and {second} are one parameter, but their numbers differ: where the head is no copy of the table, "
        f'write "tie_word_embeddings": false into {CONFIG} (tie_embeddings=False of our models)'
        for first, second in different[:1]
    ]
    if problems:
        raise CheckpointError(f"{path}: is not the {family.architecture} of its {CONFIG}: {'; '.join(problems)}")
    return placed


def listed(names: Sequence[str]) -> str:
    """The first of some names."""
    return ", ".join(names[:_MOST_LISTED]) + (", .." if len(names) > _MOST_LISTED else "")


def _are_equal(folder: Path, *tensors: StoredTensor) -> bool:
    """Whether two tensors are the same to the byte."""
    one, other = tensors
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    num_bytes = math.prod(one.shape) * ITEM_BYTES.get(one.dtype, 0)
    first, second = (np.memmap(folder / each.file, np.uint8, "r", each.offset, num_bytes) for each in tensors)
    return first.data == second.data
