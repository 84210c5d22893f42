"""``model = dict(type="hf", path=...)``: a config that names a source of models holds, once it is loaded, the model
itself, and its text is read by the tokenizer of that model. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colossus.config.checkpoint import Weights
from colossus.config.errors import ConfigError
from colossus.config.ranges import is_text
from colossus.config.schema import Config
from colossus.config.section import Named
from colossus.registry import MODEL_SOURCES


def resolve_model(config: Config) -> Config:
    """The config with the model that its source means, the source's weights unless ``checkpoint.weights`` is given, and
    its tokenizer where `with_tokenizer` puts it.

    Raises:
        ConfigError: when the source has no such model.
    """
    model, weights = config.model, config.checkpoint.weights
    if model is None or not isinstance(model.type, str) or model.type not in MODEL_SOURCES:
        _require_path(weights)
        return config
    try:
        spec, path, tokenizer = MODEL_SOURCES.get(model.type)(model.options)
    except ValueError as error:
        raise ConfigError(f"model: {error}") from None
    checkpoint = config.checkpoint
    if path is not None and (weights is None or not weights.path):
        weights = Weights(path=path) if weights is None else weights.model_copy(update={"path": path})
        checkpoint = checkpoint.model_copy(update={"weights": weights})
    _require_path(weights)
    config = config.model_copy(update={"model": Named(**spec), "checkpoint": checkpoint})
    return config if tokenizer is None else with_tokenizer(config, tokenizer)


def _require_path(weights: Weights | None) -> None:
    if weights is not None and not weights.path:
        raise ConfigError('checkpoint.weights.path: is missing; of model = dict(type="hf", path=...) alone it is known')


def with_tokenizer(config: Config, path: str) -> Config:
    """The config whose text, also that of ``data.validation``, becomes ids by a model's own tokenizer, where it names
    none; ``tokenizer="bytes"`` names one.

    Args:
        path: of the tokenizer.json, or of a folder with it.
    """
    data = config.data
    if not isinstance(data, Named):
        return config
    return config.model_copy(update={"data": Named(**_filled(data.spec(), path))})


def _filled(data: dict[str, Any], path: str) -> dict[str, Any]:
    out, validation = dict(data), data.get("validation")
    if is_text(data["type"]) and data.get("tokenizer") is None:
        out["tokenizer"] = path
    if isinstance(validation, Mapping) and "type" in validation:  # else its options are laid over these
        out["validation"] = _filled(dict(validation), path)
    elif is_text(validation):
        out["validation"] = {"type": validation, "tokenizer": path}
    return out
