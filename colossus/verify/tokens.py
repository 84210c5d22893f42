"""Where the tokens that a rank holds stand in their sequences."""

from __future__ import annotations

from typing import Any

import torch

from colossus.context.parallel_context import ParallelContext
from colossus.engine.inputs import sequence_length
from colossus.layers.model_parallel import model_parallel_of


class TokenPlaces:
    """The positions of one rank's tokens; in one process these are all."""

    def __init__(self, context: ParallelContext) -> None:
        self._sequence = model_parallel_of(context).sequence
        self._index = context.index("sequence")

    def of(self, samples: Any) -> tuple[int, list[int]]:
        """Tokens of a sequence without padding, and the position of each token that the model of this rank gets.

        Args:
            samples: of a batch, with all their tokens.
        """
        num_tokens = sequence_length(samples)
        if self._sequence is None:
            return num_tokens, list(range(num_tokens))
        num_local = self._sequence.padded_length(num_tokens) // self._sequence.num_shards
        positions = self._sequence.positions(num_local, self._index, self._sequence.num_shards, torch.device("cpu"))
        return num_tokens, positions.tolist()
