"""``config.json`` of a model folder of Hugging Face as our own model. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.checkpoint.manifest import TOKENIZER_FILE
from colossus.checkpoint.weight_sources import LABELS, TOKEN_IDS
from colossus.config.errors import explain
from colossus.hf.family import Family
from colossus.registry import HF_FAMILIES, MODEL_OPTIONS

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: keys of a config that colossus has nothing for
_REFUSED = {"quantization_config": "quantised weights", "auto_map": "code of the model's own"}


def is_hf_folder(path: Path) -> bool:
    """Whether it is meant as one: it has a config with a ``model_type``, or weights under their names."""
    if not path.is_dir():
        return False
    if any((path / name).exists() for name in (SINGLE, INDEX)):
        return True
    try:
        return "model_type" in read_json(path / CONFIG)
    except CheckpointError:
        return False


def read_json(path: Path) -> dict[str, Any]:
    """An object out of a JSON file.

    Raises:
        DamagedCheckpoint: there is none.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path.parent}: there is no {path.name} in it") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DamagedCheckpoint(f"{path}: cannot be read: {reason}") from None
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
                problems.append(f"{theirs.get(option, option)}{dot}{inside}: {problem}")
    if problems:
        raise CheckpointError(f"{path / CONFIG}: {'; '.join(problems)}")
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


def resolve(options: Mapping[str, Any]) -> tuple[dict[str, Any], str | None, str | None]:
    """What ``model = dict(type="hf", path=..)`` means: our model, the path of its weights (None where it begins with
    fresh ones), and that of its tokenizer (None where the folder has no tokenizer.json).

    Args:
        options: ``path``, a model folder of Hugging Face, relative to where the run is started; ``weights``, False for
            the initial values of a new model; all others are options of ours that differ from what the folder says.

    Raises:
        ValueError: without a path, or when the folder's model is none that colossus has.
    """
    given = dict(options)
    path, weights = given.pop("path", None), given.pop("weights", True)
    if not isinstance(path, str) or not path:
        raise ValueError(f'needs the path of a model folder: dict(type="hf", path="models/gpt2"), got path = {path!r}')
    if not isinstance(weights, bool):
        raise ValueError(f"weights = {weights!r}: True takes those of the folder, False begins with fresh ones")
    folder = Path(path).expanduser()
    if not is_hf_folder(folder):
        if folder.is_dir():
            raise ValueError(
                f"path = {path!r}: has no {CONFIG} with a model_type; a model folder of Hugging Face has one"
            )
        raise ValueError(
            f"path = {path!r}: there is no such folder; colossus downloads nothing: of a model of the Hub, "
            f"huggingface_hub.snapshot_download(..) makes a folder and returns its path. A run goes on without its "
            f"folder: put the `model` that is in the config.json of the run folder in the place of this one"
        )
    _, spec = spec_of(folder, read_json(folder / CONFIG), given)
    return spec, path if weights else None, path if (folder / TOKENIZER_FILE).is_file() else None
