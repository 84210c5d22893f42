"""The split of a sequence's tokens over the ranks of the sequence axis."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from colossus.arithmetic import round_up
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.registry import SEQUENCE_MODES
from colossus.sequence_parallel.modes import SequenceMode, length_multiple, require_divisible, zigzag_order

#: the largest number of shards whose positions are cached
_MAX_SHARDS = 16


class Segments(NamedTuple):
    """The equal runs of consecutive tokens of which the ranks' shards consist.

    Attributes:
        length: tokens of a run.
        order: the numbers of all runs in the order of their tokens; runs are counted through the shards of all ranks.
    """

    length: int
    order: list[int]


class SequenceSplit:
    """The split of sequences over the ranks of one context: equal shards of the zigzag order (`zigzag_order`).

    Attributes:
        mode: how attention looks past the tokens of a rank.
        axes: the atomic axes over which tokens are split, outermost first.
        num_shards: ranks that hold one sequence.
        chunks: of the sequence, on each ring rank.
    """

    def __init__(self, context: ParallelContext) -> None:
        self._context = context
        self.mode: type[SequenceMode] = SEQUENCE_MODES.get(context.options.sequence_mode)
        self.axes = context.grid.axes("sequence")
        self.num_shards = context.size(self.axes)
        self.chunks = context.options.sequence_chunks
        self._ring_size = context.size(self.mode.ring)
        self._ulysses_size = context.size(self.mode.ulysses)
        self._positions: dict[tuple[int, int, int, torch.device], Tensor] = {}

    @property
    def ring(self) -> AxisGroup:
        return self._context.group(self.mode.ring)

    @property
    def ulysses(self) -> AxisGroup:
        return self._context.group(self.mode.ulysses)

    def padded_length(self, num_tokens: int) -> int:
        """Return the smallest length of at least ``num_tokens`` that the mode can split evenly."""
        return round_up(num_tokens, length_multiple(self._ring_size, self._ulysses_size, self.chunks))

    def positions(self, num_local: int, index: int, num_shards: int, device: torch.device) -> Tensor:
        """Return the position in the sequence of each token of one shard, [num_local]; one object for each shard.

        Args:
            num_local: tokens of a shard.
            index, num_shards: which of how many equal shards; more than the sequence ranks where an axis of the tensor
                mode splits tokens further.
        """
        key = num_local, index, num_shards, device
        if key not in self._positions:
            num_tokens = num_local * num_shards
            require_divisible(num_tokens, self._ring_size, self._ulysses_size, self.chunks)
            shard = zigzag_order(num_tokens, self._ring_size, self.chunks)[index * num_local : (index + 1) * num_local]
            if len(self._positions) >= _MAX_SHARDS:
                self._positions.clear()
            with torch.inference_mode(False):  # what a validation leaves here, training saves for backward
                self._positions[key] = torch.as_tensor(shard, device=device)
        return self._positions[key]

    def segments(self, num_local: int) -> Segments:
        """Return the runs of consecutive tokens of shards with ``num_local`` tokens each."""
        total = num_local * self.num_shards
        length = num_local if self._ring_size == 1 else math.gcd(num_local, total // (self.chunks * self._ring_size))
        starts = zigzag_order(total // length, self._ring_size, self.chunks)
        return Segments(length, sorted(range(len(starts)), key=starts.__getitem__))

    def order(self, num_local: int, device: torch.device) -> Tensor:
        """Return the index of each token of the sequence in the concatenation of all ranks' shards, [tokens]."""
        count = self.num_shards
        return torch.cat([self.positions(num_local, index, count, device) for index in range(count)]).argsort()

    def local_shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's tokens of sequences: [.., tokens, ..] -> [.., tokens / num_shards, ..].

        Raises:
            ValueError: the mode cannot split that number of tokens evenly.
        """
        num_tokens = x.shape[dim]
        require_divisible(num_tokens, self._ring_size, self._ulysses_size, self.chunks)
        index = self._context.index(self.axes)
        return x.index_select(dim, self.positions(num_tokens // self.num_shards, index, self.num_shards, x.device))
