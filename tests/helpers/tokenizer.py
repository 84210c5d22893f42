"""A small ``tokenizer.json``, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TEXT = "the quick brown fox jumps over the lazy dog; the dog sleeps, the fox does not.\n"
#: of `make_tokenizer`
VOCABULARY = 300


def make_tokenizer(folder: Path, vocabulary: int = VOCABULARY) -> Path:
    """A byte-level BPE of `VOCABULARY` tokens, the last of them special, saved as ``tokenizer.json`` in a folder."""
    tokenizers: Any = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary - 1, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    made.train_from_iterator([TEXT] * 3, trainer)
    made.add_special_tokens(["<|end|>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", made.token_to_id("<|end|>"))]
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    made.save(str(path))
    return path
