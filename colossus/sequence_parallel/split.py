"""How the tokens of a sequence are split over the ranks of the sequence axis."""

from __future__ import annotations

import torch
from torch import Tensor

from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.registry import SEQUENCE_MODES
from colossus.sequence_parallel.modes import SequenceMode
from colossus.sequence_parallel.order import order, require_divisible, unit_of

#: lengths of sequences that are remembered
_MOST_LENGTHS = 8


class SequenceSplit:
    """The tokens of this rank: a part of the sequence in the order of the ring's zigzag (see `order`).

    Attributes:
        length: tokens of the sequences now at work, without padding; the engine sets it at the model's door. None: as
            many as there are.
    """

    def __init__(self, context: ParallelContext) -> None:
        self._context = context
        self.mode: type[SequenceMode] = SEQUENCE_MODES.get(context.options.sequence_mode)
        self.axes = context.grid.axes("sequence")
        self.ways = context.size(self.axes)
        self._ring_ways = context.size(self.mode.ring)
        self._ulysses_ways = context.size(self.mode.ulysses)
        self.length: int | None = None
        self._orders: dict[tuple[int, torch.device], Tensor] = {}
        self._positions: dict[tuple[int, int, int, torch.device], Tensor] = {}

    @property
    def ring(self) -> AxisGroup:
        return self._context.group(self.mode.ring)

    @property
    def ulysses(self) -> AxisGroup:
        return self._context.group(self.mode.ulysses)

    def padded(self, tokens: int) -> int:
        """The least number of tokens from ``tokens`` on that divides."""
        unit = unit_of(self._ring_ways, self._ulysses_ways)
        return -(-tokens // unit) * unit

    def order(self, tokens: int, device: torch.device) -> Tensor:
        """Place in the sequence of each token in the order in which parts are cut from it, [tokens].

        Raises:
            ValueError: when they do not divide, with the lengths that do.
        """
        key = tokens, device
        if key not in self._orders:
            require_divisible(tokens, self._ring_ways, self._ulysses_ways)
            if len(self._orders) >= _MOST_LENGTHS:
                self._orders.clear()
                self._positions.clear()
            self._orders[key] = torch.as_tensor(order(tokens, self._ring_ways), device=device)
        return self._orders[key]

    def positions(self, local: int, part: int, ways: int, device: torch.device) -> Tensor:
        """Place in the sequence of each of the ``local`` tokens of part ``part`` of ``ways`` equal ones, [local]."""
        whole = self.order(local * ways, device)
        key = local, part, ways, device
        if key not in self._positions:
            self._positions[key] = whole[part * local : (part + 1) * local]
        return self._positions[key]

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a whole tensor: [.., tokens, ..] -> [.., tokens / ranks, ..]."""
        tokens = x.shape[dim]
        require_divisible(tokens, self._ring_ways, self._ulysses_ways)
        place = self._context.index(self.axes)
        return x.index_select(dim, self.positions(tokens // self.ways, place, self.ways, x.device))
