"""GPT: the decoder with every choice open."""

from __future__ import annotations

from colossus.models.decoder import Decoder
from colossus.models.options import GPTOptions
from colossus.registry import MODELS


@MODELS.register("GPT")
class GPT(Decoder):
    """Decoder-only language model, by default that of GPT-2; options as in `GPTOptions`, shapes as of `Decoder`."""

    options_class = GPTOptions
