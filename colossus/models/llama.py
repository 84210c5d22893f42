"""Llama 2 and 3."""

from __future__ import annotations

from colossus.models.decoder import Decoder
from colossus.models.options import LlamaOptions
from colossus.registry import MODELS


@MODELS.register("Llama")
class Llama(Decoder):
    """Llama 2 (2307.09288) and 3 (2407.21783): rotary positions, RMSNorm, SwiGLU, grouped-query attention.

    Options as in `LlamaOptions`, shapes as of `Decoder`. Other initial values than GPT-2's were not published.
    """

    options_class = LlamaOptions
