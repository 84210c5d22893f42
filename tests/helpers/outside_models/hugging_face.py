"""Models of transformers from a class, a config and sizes; and the names of sizes that most of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from helpers.outside_models.batches import HEADS, INNER, TOKENS, VOCAB, WIDTH, tokens
from helpers.outside_models.rows import text
from torch import nn

SIZES: dict[str, Any] = dict(
    hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=HEADS, vocab_size=VOCAB,
    max_position_embeddings=2 * TOKENS, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
#: two queries to a key, and heads that are not the width over their number
GROUPED: dict[str, Any] = SIZES | dict(num_attention_heads=2 * HEADS, num_key_value_heads=HEADS, head_dim=6)
NO_DROPOUT: dict[str, Any] = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def transformer(model: str, config: str, **options: Any) -> nn.Module:
    import transformers

    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    return made


def maker(family: str, head: str, **options: Any) -> Callable[[], nn.Module]:
    """Return a function that builds ``<family>For<head>`` from ``<family>Config``."""
    return partial(transformer, f"{family}{head}", f"{family}Config", **options)


def causal(name: str, family: str, *, refused: Mapping[str, str] | None = None, **options: Any) -> None:
    """Register a decoder of texts, with and without padding."""
    more = {key: options.pop(key) for key in ("refused_padded", "example") if key in options}
    text(name, maker(family, "ForCausalLM", **options), tokens, refused=refused, **more)
