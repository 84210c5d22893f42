"""Builds the config's model without a number in it, so that sizes that cannot be split are told before launch."""

from __future__ import annotations

from dataclasses import dataclass

from colossus.config import Config, ConfigError
from colossus.registry import MODELS


@dataclass(frozen=True)
class ModelFacts:
    """Parameters of the whole model, and of what rank 0 holds of it."""

    num_parameters: int
    num_local_parameters: int


def check_model(config: Config) -> ModelFacts | None:
    """Rank 0's part of the model on the meta device, under a context that joins nobody.

    Returns:
        None when the config has no model, or when its constructor fails for another reason than a size or an option:
        the ranks will tell that with a traceback.

    Raises:
        ConfigError: for what the layers refuse.
    """
    # torch comes in here, once the config is known to be right in itself: it takes seconds to import
    from colossus.context.parallel_context import ParallelContext
    from colossus.layers.construct import build
    from colossus.layout.parameter import num_parameters

    if config.model is None:
        return None
    spec = config.model.spec()
    try:
        context = ParallelContext.from_config(config, connect=False)
        model = build(lambda: MODELS.build(spec), context, materialize=False)
    except ValueError as error:
        raise ConfigError([f"the model cannot be built under this plan: {error}"], config.source) from error
    except Exception:
        return None
    return ModelFacts(num_parameters(model), sum(parameter.numel() for parameter in model.parameters()))
