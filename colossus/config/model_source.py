"""``model = dict(type="hf", path=...)``: a config that names a source of models holds, once it is loaded, the model
itself. No torch."""

from __future__ import annotations

from colossus.config.checkpoint import Weights
from colossus.config.errors import ConfigError
from colossus.config.schema import Config
from colossus.config.section import Named
from colossus.registry import MODEL_SOURCES


def resolve_model(config: Config) -> Config:
    """The config with the model that its source means, and the source's weights unless ``checkpoint.weights`` is given.

    Raises:
        ConfigError: when the source has no such model.
    """
    model, weights = config.model, config.checkpoint.weights
    if model is None or not isinstance(model.type, str) or model.type not in MODEL_SOURCES:
        _require_path(weights)
        return config
    try:
        spec, path = MODEL_SOURCES.get(model.type)(model.options)
    except ValueError as error:
        raise ConfigError(f"model: {error}") from None
    checkpoint = config.checkpoint
    if path is not None and (weights is None or not weights.path):
        weights = Weights(path=path) if weights is None else weights.model_copy(update={"path": path})
        checkpoint = checkpoint.model_copy(update={"weights": weights})
    _require_path(weights)
    return config.model_copy(update={"model": Named(**spec), "checkpoint": checkpoint})


def _require_path(weights: Weights | None) -> None:
    if weights is not None and not weights.path:
        raise ConfigError('checkpoint.weights.path: is missing; of model = dict(type="hf", path=...) alone it is known')
