"""What ZeRO gathers and reduces: the collectives of a unit of parameters of which ranks store rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from colossus.comm.shared_memory import SLOT_BYTES
from colossus.planner.collective import Collective
from colossus.planner.parameter_facts import ParameterFacts, ParameterKind, itemsize
from colossus.planner.plan_axes import PlanAxes
from colossus.planner.sharded_units import rows_per_rank

#: a block of the chain, and parameters that are gathered as one while it runs
Unit = tuple[int, Sequence[ParameterFacts]]


@dataclass(frozen=True)
class _Flat:
    """Parameters that travel in one collective, by their places in the unit."""

    places: tuple[int, ...]
    gather: Collective
    reduction: Collective | None


class ZeroTraffic:
    """Of a plan.

    Args:
        on_cpu: whether what travels has to fit a slot of shared memory.
    """

    def __init__(self, axes: PlanAxes, *, on_cpu: bool) -> None:
        self._axes, self._on_cpu = axes, on_cpu
        #: by the ids of their parameters' kinds: equal units move as much
        self._known: dict[tuple[int, ...], list[_Flat]] = {}

    def gathers(self, params: Sequence[ParameterFacts]) -> tuple[Collective, ...]:
        """What makes them whole; nothing over one rank."""
        return tuple(flat.gather for flat in self._flats(params) if flat.gather.ranks > 1)

    def reductions(self, params: Sequence[ParameterFacts]) -> list[tuple[list[ParameterFacts], tuple[Collective, ...]]]:
        """Those whose gradients travel together, and how: by one collective, or where no ranks share rows by none."""
        return [
            ([params[place] for place in flat.places], (flat.reduction,) if flat.reduction.ranks > 1 else ())
            for flat in self._flats(params)
            if flat.reduction is not None
        ]

    def _flats(self, params: Sequence[ParameterFacts]) -> list[_Flat]:
        key = tuple([id(one.kind) for one in params])
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = list(self._make(params))
        return found

    def _make(self, params: Sequence[ParameterFacts]) -> Iterator[_Flat]:
        together: dict[object, list[int]] = {}
        for place, one in enumerate(params):
            kind = one.kind
            key = self._axes.rows_of(kind.cut_axes), kind.sharded, kind.is_trainable
            together.setdefault(key, []).append(place)
        for places in together.values():
            kinds = [params[place].kind for place in places]
            over = self._axes.rows_of(kinds[0].cut_axes)
            for start, stop in self._chunks(kinds, self._axes.size(over)):
                yield self._flat(places[start:stop], kinds[start:stop], over)

    def _flat(self, places: Sequence[int], kinds: Sequence[ParameterKind], over: tuple[str, ...]) -> _Flat:
        ranks, name = self._axes.size(over), self._axes.name(over)
        computed, _, reduced, _ = kinds[0].sharded
        size = sum(rows_per_rank(kind, ranks) * kind.row for kind in kinds)
        gather = Collective("all_gather", name, ranks, size * itemsize(computed), computed, over)
        reduction = None
        if kinds[0].is_trainable:  # with a flag for each parameter
            held = ranks * (size + len(kinds)) * itemsize(reduced)
            reduction = Collective("reduce_scatter", name, ranks, held, reduced, over)
        return _Flat(tuple(places), gather, reduction)

    def _chunks(self, kinds: Sequence[ParameterKind], ranks: int) -> Iterator[tuple[int, int]]:
        """On CPU as many as fit a slot of shared memory: ranges."""
        start, size = 0, 0
        for number, kind in enumerate(kinds if self._on_cpu else ()):
            wide = max(itemsize(kind.sharded[0]), itemsize(kind.sharded[2]))
            nbytes = (kind.elements + ranks * (len(kind.rows) * kind.row + 1)) * wide
            if number > start and size + nbytes > SLOT_BYTES:
                yield start, number
                start, size = number, 0
            size += nbytes
        yield start, len(kinds)


def together(units: Sequence[Unit]) -> list[Unit]:
    """Units that are whole for all of a step: those that follow each other as one while they are small, as
    `colossus.data_parallel.zero.blocks.in_buckets` has them. Each with its first block."""
    found: list[tuple[int, list[ParameterFacts]]] = []
    size = 0
    for block, params in units:
        nbytes = sum(one.kind.elements * itemsize(one.kind.dtype) for one in params)
        if not found or size + nbytes > SLOT_BYTES:
            found.append((block, []))
            size = 0
        found[-1][1].extend(params)
        size += nbytes
    return list(found)
