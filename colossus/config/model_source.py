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
    model = config.model
    if model is None or not isinstance(model.type, str) or model.type not in MODEL_SOURCES:
        return config
    try:
        spec, path = MODEL_SOURCES.get(model.type)(model.options)
    except ValueError as error:
        raise ConfigError(f"model: {error}") from None
    checkpoint = config.checkpoint
    if path is not None and checkpoint.weights is None:
        checkpoint = checkpoint.model_copy(update={"weights": Weights(path=path)})
    return config.model_copy(update={"model": Named(**spec), "checkpoint": checkpoint})
