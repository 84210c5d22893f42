"""Models of transformers' own code: their config, and the layout of their parameters in a folder. No torch."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Mapping
from typing import Any

from colossus.checkpoint.manifest import TOKENIZER_FILE
from colossus.config.user_path import user_path
from colossus.hf.family import Part, Row, Shape
from colossus.hf.hf_folder import CONFIG, is_hf_folder, read_json

#: model types with transformers' ``Conv1D``, whose weights are [in, out] there, and the names of such weights
_CONV1D_TYPES = ("gpt2", "openai-gpt", "decision_transformer", "imagegpt")
_CONV1D = ("*.c_attn.weight", "*.q_attn.weight", "*.c_proj.weight", "*.c_fc.weight")
#: options of ours that are no keys of transformers' config
_OWN = ("native", "path", "weights", "config", "architecture", "rules", "blocks")


def is_native(options: Mapping[str, Any]) -> bool:
    """Return whether ``dict(type="hf", **options)`` is a model of transformers' own code."""
    return bool(options.get("native")) or "config" in options


def resolve_native(options: Mapping[str, Any]) -> tuple[dict[str, Any], None, str | None]:
    """Return the model of ``dict(type="hf", native=True, path=..)``, or of one with ``config=dict(model_type=..)``.

    Args:
        options: ``path``, a model folder; or ``config``, the content of its config.json; ``weights``, False for initial
            values in spite of a path; ``architecture``, a class of transformers; ``rules`` and ``blocks`` as for
            `colossus.parallelize`; all others are laid over the config.

    Returns:
        The spec with the whole config in it, no weights (the model loads them), and the folder of the tokenizer.

    Raises:
        ValueError: no config names a model type.
    """
    path, weights = options.get("path"), options.get("weights", True)
    if isinstance(weights, str):  # a config that was resolved and printed
        path, weights = weights, True
    config = dict(options.get("config") or {})
    if path is not None:
        folder = user_path(str(path))
        if not is_hf_folder(folder):
            raise ValueError(f"path = {path!r}: is no model folder of Hugging Face (a {CONFIG} with a model_type)")
        config = read_json(folder / CONFIG) | config
    config |= {key: value for key, value in options.items() if key not in _OWN}
    if not isinstance(config.get("model_type"), str):
        raise ValueError('needs path="models/qwen3", or config=dict(model_type="qwen3", ..) with a model type')
    spec = {"type": "hf", "native": True, "config": config, "weights": path if weights else None}
    spec |= {key: options[key] for key in ("architecture", "rules", "blocks") if options.get(key) is not None}
    has_tokenizer = path is not None and (user_path(str(path)) / TOKENIZER_FILE).is_file()
    return spec, None, path if has_tokenizer else None


def is_transposed(config: Mapping[str, Any], name: str) -> bool:
    """Return whether transformers stores this weight as [in, out], where colossus has [out, in]."""
    is_conv1d = config.get("model_type") in _CONV1D_TYPES
    return is_conv1d and any(fnmatch.fnmatchcase(name, pattern) for pattern in _CONV1D)


def native_rows(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> list[Row]:
    """Return the tensors of a folder with a model whose parameters have transformers' own names."""
    return [Row(name, (Part(name, shape),), is_transposed(config, name)) for name, shape in shapes.items()]


def original_config(model: Any, outermost: Any = None) -> Any:
    """Return a copy of the config of a model of transformers' own code, as `colossus.parallelize` got it.

    Args:
        outermost: the module that was parallelized, where that is a module around the model.
    """
    cached = vars(model if outermost is None else outermost).get("_colossus_cached", ())
    for config in cached:
        config.use_cache = True
    try:
        return copy.deepcopy(model.config)
    finally:
        for config in cached:
            config.use_cache = False


def native_config(model: Any) -> dict[str, Any]:
    """Return the ``config.json`` of a model of transformers' own code, as `colossus.parallelize` got it."""
    config: dict[str, Any] = original_config(model).to_dict()
    config.pop("_name_or_path", None)  # a path of this machine
    return config
