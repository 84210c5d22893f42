"""A model folder of Hugging Face: reading its config as our model, finding and checking its tensors. No torch.

``config.json`` and the headers of the files show everything that can be wrong, before a process starts.
"""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from colossus.arithmetic import listed
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.checkpoint.manifest import (
    SAFETENSORS_DTYPES,
    TOKENIZER_FILE,
    FileEntry,
    Manifest,
    TensorEntry,
)
from colossus.checkpoint.weight_sources import LABELS, TOKEN_IDS
from colossus.config.errors import explain
from colossus.hf.family import Family, Row
from colossus.registry import HF_FAMILIES, MODELS

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: keys of a config that colossus does not support
_REFUSED = {"quantization_config": "quantised weights", "auto_map": "code of the model's own"}
#: safetensors' name of a dtype -> torch's name
_DTYPES = {code: name for name, code in SAFETENSORS_DTYPES.items() if not name.startswith("complex")}
_FLOATS = ("float64", "float32", "float16", "bfloat16")
#: at most so many wrong shapes and dtypes are listed in an error
_MOST_LISTED = 4


def is_hf_folder(path: Path) -> bool:
    """Return whether a folder has a config with a ``model_type``, or weights under Hugging Face's file names."""
    if not path.is_dir():
        return False
    if any((path / name).exists() for name in (SINGLE, INDEX)):
        return True
    try:
        return "model_type" in read_json(path / CONFIG)
    except DamagedCheckpoint:
        return False


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        DamagedCheckpoint: the file has none.
        CheckpointError: the file may not be read.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except PermissionError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: cannot be read: {error}") from None
    if not isinstance(body, dict):
        raise DamagedCheckpoint(f"{path}: holds a {type(body).__name__} where an object is expected")
    return body


def spec_of(path: Path, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Return the family of a config, and our model with the caller's options laid over those of the config.

    Raises:
        CheckpointError: names the keys and values that colossus has no model for.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in HF_FAMILIES:
        families = ", ".join(HF_FAMILIES.names())
        raise CheckpointError(f"{path / CONFIG}: model_type = {kind!r}: colossus reads {families}")
    family: Family = HF_FAMILIES.get(kind)()
    problems = [f"{key}: colossus reads no {what}" for key, what in _REFUSED.items() if config.get(key)]
    spec = family.to_spec(config, overrides, problems)
    if not problems:
        try:
            options_of(spec)
        except ValidationError as error:
            theirs = {key.ours: key.theirs for key in family.keys}
            for option_path, problem in explain(error, MODELS.options(spec["type"])).items():
                option, dot, inside = option_path.partition(".")
                name = theirs.get(option_path, f"{theirs.get(option, option)}{dot}{inside}")
                problems.append(f"{name}: {problem}")
    if problems:
        raise CheckpointError(f"{path / CONFIG}: {'; '.join(problems)}")
    for key in family.keys:  # the caller may override single options of a section
        section = key.ours.partition(".")[0]
        if section != key.ours and isinstance(overrides.get(section), Mapping):
            overrides = {**overrides, section: {**spec[section], **overrides[section]}}
    return family, spec | dict(overrides)


def options_of(spec: Mapping[str, Any]) -> Any:
    """Return the checked options of ``dict(type=.., **options)``."""
    return MODELS.options(spec["type"])(**{key: value for key, value in spec.items() if key != "type"})


def non_model_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a ``config.json`` that say nothing about the model: special tokens, names of classes."""
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {key: config[key] for key in tokens if config.get(key) is not None}
    names = ("id2label", "label2id")
    labels = {key: config[key] for key in names if isinstance(config.get(key), Mapping) and config[key]}
    return {title: section for title, section in ((TOKEN_IDS, ids), (LABELS, labels)) if section}


# -- its tensors -----------------------------------------------------------------------------------------


class StoredTensor(NamedTuple):
    """A row-major tensor of a file: its dtype by torch's name, and the offset of its first byte.

    A flat one has one dim in the place of its shape (DeepSpeed's ZeRO 3).
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    is_flat: bool = False


class HFFolder(NamedTuple):
    """A model folder whose tensors are those of its config.

    Attributes:
        placed: each tensor of the model, in its order, with its place in a file.
        manifest: the folder's content by our names: tensors without chunks, files without checksums, the model's
            options.
    """

    placed: list[tuple[Row, StoredTensor]]
    manifest: Manifest


def read_folder(path: Path, stored: Mapping[str, StoredTensor] | None = None) -> HFFolder:
    """Return a model folder that has all tensors of its config, in the config's shapes, and no others.

    Args:
        path: the folder.
        stored: its tensors by name; None: those of its safetensors files.

    Raises:
        DamagedCheckpoint: a file is missing, truncated, or not of the format of its name.
        CheckpointError: colossus has no such model, or the folder has other tensors.
    """
    config = read_json(path / CONFIG)
    family, spec = spec_of(path, config, {})
    options = options_of(spec)
    stored = stored_tensors(path) if stored is None else stored
    if options.num_layers > len(stored):
        raise CheckpointError(
            f"{path / CONFIG}: says {options.num_layers} layers, the files have {len(stored)} tensors"
        )
    placed = _place(path, family, family.tensors(options), stored)
    written_by = config.get("transformers_version")
    files = sorted({tensor.file for tensor in stored.values()})
    manifest = Manifest(
        step=0,
        saved_at=(path / CONFIG).stat().st_mtime,
        versions={"transformers": written_by} if isinstance(written_by, str) else {},
        plan={"text": f"a folder of Hugging Face ({family.model_type})"},
        config={"model": {"type": spec["type"], **options.model_dump()}, **non_model_config(config)},
        files={name: FileEntry((path / name).stat().st_size, 0) for name in files},
        tensors={
            f"model/{part.name}": TensorEntry(there.dtype, part.shape, ())
            for tensor, there in placed
            for part in tensor.parts
        },
        aliases=family.aliases(options),
        tokenizer=TOKENIZER_FILE if (path / TOKENIZER_FILE).is_file() else None,
    )
    return HFFolder(placed, manifest)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a folder by name."""
    if (path / SINGLE).exists():
        return _header(path, SINGLE)
    if not (path / INDEX).exists():
        raise CheckpointError(f"{path}: {_without_weights(path)}")
    by_name = read_json(path / INDEX).get("weight_map")
    if not isinstance(by_name, dict) or not by_name:
        raise DamagedCheckpoint(f"{path / INDEX}: has no weight_map")
    stored: dict[str, StoredTensor] = {}
    for file in sorted({str(file) for file in by_name.values()}):
        if Path(file).name != file:
            raise DamagedCheckpoint(f"{path / INDEX}: names a file {file!r}, which is no plain file name")
        stored |= _header(path, file)
    return stored


def _header(folder: Path, name: str) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name. The library has checked that each byte belongs to one tensor.

    Raises:
        DamagedCheckpoint: the file is missing, truncated, or no safetensors file.
        CheckpointError: the file cannot be read.
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
    tensors = {}
    for key, entry in entries.items():
        if key != "__metadata__":
            dtype, offset = _DTYPES.get(entry["dtype"], entry["dtype"]), 8 + length + entry["data_offsets"][0]
            tensors[key] = StoredTensor(name, dtype, tuple(entry["shape"]), offset)
    return tensors


def _without_weights(path: Path) -> str:
    for name in sorted(file.name for file in path.iterdir()):
        if name.endswith((".bin", ".pt", ".pth", ".h5", ".msgpack", ".ckpt")):
            return (
                f"has {name} and no {SINGLE}: a pickle can run code, so colossus opens none. Convert it once with "
                f"transformers, if you trust it: AutoModel...from_pretrained(folder).save_pretrained(new_folder, "
                f"safe_serialization=True)"
            )
    return f"has neither {SINGLE} nor {INDEX}"


def _place(
    path: Path, family: Family, tensors: Sequence[Row], stored: Mapping[str, StoredTensor]
) -> list[tuple[Row, StoredTensor]]:
    """Return each tensor of the model with its place in a file.

    Raises:
        CheckpointError: names the tensors that are missing, left over, or of another shape or dtype.
    """
    placed: list[tuple[Row, StoredTensor]] = []
    used: set[str] = set()
    missing: list[str] = []
    problems: list[str] = []
    for tensor in tensors:
        accepted = (tensor.name, tensor.name.removeprefix(family.prefix), *tensor.other_names)
        used.update(accepted)
        name = next((name for name in accepted if name in stored), None)
        if name is None:
            missing += [] if tensor.may_be_missing else [tensor.name]
            continue
        there = stored[name]
        if there.shape != ((math.prod(tensor.shape),) if there.is_flat else tensor.shape):
            problems.append(f"{name} has shape {list(there.shape)}, {CONFIG} says {list(tensor.shape)}")
        elif there.dtype not in _FLOATS:
            problems.append(f"{name} has dtype {there.dtype}: weights are {', '.join(_FLOATS)}")
        placed.append((tensor, there))
    extra = [
        name
        for name in stored.keys() - used
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in family.ignored)
    ]
    problems = problems[:_MOST_LISTED]
    for title, names in (("missing", missing), (f"not in a {family.model_type}", sorted(extra))):
        problems += [f"{len(names)} {title}: {listed(names)}"] if names else []
    if problems:
        raise CheckpointError(f"{path}: is not the {family.architecture} of its {CONFIG}: {'; '.join(problems)}")
    return placed
