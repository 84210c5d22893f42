"""Whether weights fit the model of a config, by names and shapes, before a process starts. No torch."""

from __future__ import annotations

from pathlib import Path

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.matching import ModelTensor, match_weights
from colossus.checkpoint.sources import manifest_of
from colossus.config import Config, ConfigError, model_options
from colossus.hf.family import family_of


def check_weights(config: Config, folder: Path) -> None:
    """Refuse what the ranks would refuse of ``checkpoint.weights``, where the names of the parameters are known.

    Args:
        folder: in which they were found.

    Raises:
        ConfigError: what is missing, left over, of another shape.
    """
    known, weights = _known(config), config.checkpoint.weights
    if known is None or weights is None:
        return
    try:
        manifest = manifest_of(folder)
        match_weights(
            known, manifest.shapes("model"), manifest.aliases, only=weights.only, rename=weights.rename,
            grow=weights.grow, shorten=getattr(model_options(config), "positions_by_row", ()), strict=weights.strict,
        )  # fmt: skip
    except CheckpointError as error:
        raise ConfigError(f"checkpoint.weights = {weights.path!r}: {error}") from None


def _known(config: Config) -> dict[str, ModelTensor] | None:
    """The parameters of the model, where it is one that Hugging Face has, too."""
    options = model_options(config)
    if config.model is None or options is None:
        return None
    try:
        family = family_of(config.model.type, options)
    except CheckpointError:
        return None
    others: dict[str, list[str]] = {}
    for alias, first in family.aliases(options).items():
        others.setdefault(first, []).append(alias)
    parts = [part for tensor in family.tensors(options) for part in tensor.parts]
    return {part.name: ModelTensor(part.shape, (part.name, *others.get(part.name, ()))) for part in parts}
