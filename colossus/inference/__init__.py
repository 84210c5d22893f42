"""Text from a trained model: a checkpoint under any plan, a key/value cache, sampling."""

from typing import TYPE_CHECKING

from colossus._lazy import lazy_names

if TYPE_CHECKING:
    from colossus.inference.decoding import Decoding, generate
    from colossus.inference.sampling_options import Sampling
    from colossus.inference.source import find_source
    from colossus.inference.text_model import TextModel, load_model

__all__ = ["Decoding", "Sampling", "TextModel", "find_source", "generate", "load_model"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Decoding": "decoding",
        "Sampling": "sampling_options",
        "TextModel": "text_model",
        "find_source": "source",
        "generate": "decoding",
        "load_model": "text_model",
    },
)
