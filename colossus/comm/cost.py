"""What communication costs: elements that one rank sends, under the ring algorithms. No torch.

Everything that counts uses this: what runs is counted with it (`colossus.comm.accounting`), and what a matmul or an
attention will send is predicted with it (``traffic.py`` of `colossus.tensor_parallel` and of
`colossus.sequence_parallel`).
"""

from __future__ import annotations

from dataclasses import dataclass

#: the collective of each move that sends something (see `colossus.comm.conjugate`); the others stay on their rank
COLLECTIVES = {
    "gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "sum": "all_reduce",
    "all_to_all": "all_to_all",
}


@dataclass(frozen=True)
class Traffic:
    """Collectives that one rank starts, and elements that it sends in them."""

    calls: int = 0
    elements: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.elements + other.elements)

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.calls * times, self.elements * times)


def sent(operation: str, num_ranks: int, held: float) -> float:
    """What one rank sends in a collective over n = ``num_ranks`` ranks, in the unit of ``held``.

    The nominal count of the ring algorithms (Patarasuk and Yuan, 2009), whatever algorithm runs. With S for the whole
    tensor, all-gather and reduce-scatter send (n-1)/n S, all-reduce sends both; all-to-all sends the n-1 of n chunks
    that are not the rank's own.

    Args:
        operation: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``broadcast``.
        held: elements or bytes that the rank holds before: S / n for an all-gather, S for the others.
    """
    if num_ranks == 1:
        return 0.0
    if operation == "broadcast":
        return held
    others = held * (num_ranks - 1)
    if operation == "all_gather":
        return others
    return {"reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}[operation] * others / num_ranks


def move_traffic(move: str, num_ranks: int, held: float) -> Traffic:
    """Traffic of one move, named as in `colossus.comm.conjugate`, of a tensor of which the rank holds ``held``."""
    operation = COLLECTIVES.get(move)
    if operation is None or num_ranks == 1:
        return Traffic()
    return Traffic(1, sent(operation, num_ranks, held))
