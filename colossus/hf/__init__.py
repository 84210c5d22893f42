"""Models of Hugging Face: folders of safetensors and a ``config.json``, read into any plan and written from any.

    model = dict(type="hf", path="models/llama-3.2-1b")         # in a config: trains it
    engine.checkpoints.load_weights("models/gpt2")              # its weights, by our names
    colossus.hf.save(engine, "models/mine")                     # written from all ranks

Reading needs nothing but colossus. transformers (``pip install colossus[hf]``) loads the folders that colossus writes.
"""

from typing import TYPE_CHECKING

from colossus._lazy import lazy_names

if TYPE_CHECKING:
    from colossus.hf.family import Family
    from colossus.hf.hf_reader import HFReader
    from colossus.hf.hf_writer import save

__all__ = ["Family", "HFReader", "save"]

__getattr__, __dir__ = lazy_names(__name__, {"Family": "family", "HFReader": "hf_reader", "save": "hf_writer"})
