"""Text from a trained model, and its loss: a checkpoint under any plan, a key/value cache, sampling."""

from typing import TYPE_CHECKING

from colossus._lazy import lazy_names

_NAMES = {
    "Decoding": "decoding",
    "Sampling": "config",
    "TextModel": "model",
    "find_source": "config",
    "generate": "decoding",
    "load_model": "model",
}

if TYPE_CHECKING:
    from colossus.inference.config import Sampling, find_source
    from colossus.inference.decoding import Decoding, generate
    from colossus.inference.model import TextModel, load_model

__all__ = ["Decoding", "Sampling", "TextModel", "find_source", "generate", "load_model"]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
