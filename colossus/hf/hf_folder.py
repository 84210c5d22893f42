"""A model folder of Hugging Face: its config as our model, its tensors found and checked. No torch.

Everything that can be wrong is found from ``config.json`` and the headers of the files, before a process starts.
"""

from __future__ import annotations

import fnmatch
import json
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
from colossus.registry import HF_FAMILIES, MODEL_OPTIONS

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: keys of a config that colossus has nothing for
_REFUSED = {"quantization_config": "quantised weights", "auto_map": "code of the model's own"}
#: what safetensors calls a dtype -> torch's name
_DTYPES = {code: name for name, code in SAFETENSORS_DTYPES.items() if not name.startswith("complex")}
_FLOATS = ("float64", "float32", "float16", "bfloat16")
#: problems of tensors that are there which an error lists
_MOST_LISTED = 4


def is_hf_folder(path: Path) -> bool:
    """Whether it is meant as one: it has a config with a ``model_type``, or weights under their names."""
    if not path.is_dir():
        return False
    if any((path / name).exists() for name in (SINGLE, INDEX)):
        return True
    try:
        return "model_type" in read_json(path / CONFIG)
    except DamagedCheckpoint:
        return False


def read_json(path: Path) -> dict[str, Any]:
    """An object out of a JSON file.

    Raises:
        DamagedCheckpoint: there is none.
        CheckpointError: it may not be read.
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


def spec_of(path: Path, config: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
    """The family of a config, and our model with ``given`` options laid over what the config says.

    Raises:
        CheckpointError: naming the keys and values that colossus has no model for.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in HF_FAMILIES:
        known = ", ".join(HF_FAMILIES.names())
        raise CheckpointError(f"{path / CONFIG}: model_type = {kind!r}: colossus reads {known}")
    family: Family = HF_FAMILIES.get(kind)()
    problems = [f"{key}: colossus reads no {what}" for key, what in _REFUSED.items() if config.get(key)]
    spec = family.to_spec(config, given, problems)
    if not problems:
        try:
            options_of(spec)
        except ValidationError as error:
            theirs = {key.ours: key.theirs for key in family.keys}
            for option_path, problem in explain(error, MODEL_OPTIONS.get(spec["type"])).items():
                option, dot, inside = option_path.partition(".")
                name = theirs.get(option_path, f"{theirs.get(option, option)}{dot}{inside}")
                problems.append(f"{name}: {problem}")
    if problems:
        raise CheckpointError(f"{path / CONFIG}: {'; '.join(problems)}")
    for key in family.keys:  # of a section that the config says, options are given one by one
        section = key.ours.partition(".")[0]
        if section != key.ours and isinstance(given.get(section), Mapping):
            given = {**given, section: {**spec[section], **given[section]}}
    return family, spec | dict(given)


def options_of(spec: Mapping[str, Any]) -> Any:
    """The checked options of ``dict(type=.., **options)``."""
    return MODEL_OPTIONS.get(spec["type"])(**{key: value for key, value in spec.items() if key != "type"})


def beside_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a ``config.json`` is none of the model's: ids of special tokens, names of classes."""
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {key: config[key] for key in tokens if config.get(key) is not None}
    names = ("id2label", "label2id")
    labels = {key: config[key] for key in names if isinstance(config.get(key), Mapping) and config[key]}
    return {title: found for title, found in ((TOKEN_IDS, ids), (LABELS, labels)) if found}


# -- its tensors -----------------------------------------------------------------------------------------


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file, row-major: its dtype by torch's name, and the offset of its first byte."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class HFFolder(NamedTuple):
    """A model folder whose tensors are those that its config tells of.

    Attributes:
        placed: each tensor of the model, in its order, with where it is.
        manifest: what the folder holds, by our names: tensors without chunks, files without checksums, the model's
            options.
    """

    placed: list[tuple[Row, StoredTensor]]
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
    stored = stored_tensors(path)
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
            f"model/{part.name}": TensorEntry(there.dtype, part.shape, ())
            for tensor, there in placed
            for part in tensor.parts
        },
        aliases=family.aliases(options),
        tokenizer=TOKENIZER_FILE if (path / TOKENIZER_FILE).is_file() else None,
    )
    return HFFolder(placed, manifest)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
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
        if Path(file).name != file:
            raise DamagedCheckpoint(f"{path / INDEX}: names a file {file!r}, which is no plain file name")
        stored |= _header(path, file)
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
    for name in sorted(each.name for each in path.iterdir()):
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
    """Each tensor of the model with where it is.

    Raises:
        CheckpointError: naming what is missing, left over, of another shape or dtype.
    """
    placed: list[tuple[Row, StoredTensor]] = []
    used: set[str] = set()
    missing: list[str] = []
    problems: list[str] = []
    for tensor in tensors:
        known = (tensor.name, tensor.name.removeprefix(family.prefix), *tensor.other_names)
        used.update(known)
        name = next((each for each in known if each in stored), None)
        if name is None:
            missing += [] if tensor.may_be_missing else [tensor.name]
            continue
        there = stored[name]
        if there.shape != tensor.shape:
            problems.append(f"{name} has shape {list(there.shape)}, {CONFIG} says {list(tensor.shape)}")
        elif there.dtype not in _FLOATS:
            problems.append(f"{name} has dtype {there.dtype}, which are no weights that can be trained")
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
