"""The gathers and reductions of ZeRO: the collectives of parameters that ranks store by rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from colossus.comm import shared_memory
from colossus.comm.flat_buffer import chunks
from colossus.planner.collective import Collective
from colossus.planner.parameter_facts import ParameterFacts, ParameterKind, itemsize
from colossus.planner.plan_axes import PlanAxes
from colossus.planner.sharded_units import rows_per_rank

#: a block of the chain, and the parameters that are gathered together while it runs
Unit = tuple[int, Sequence[ParameterFacts]]


@dataclass(frozen=True)
class RowTraffic:
    """Parameters of a unit that travel in one collective.

    Attributes:
        places: their indices in the unit.
        gather: the gather of their values.
        reduction: the reduction of their gradients, None if they are frozen.
        whole: bytes of the gathered parameters.
        gradients: bytes of their whole gradients, 0 if they are frozen.
        sums: bytes of the rows of the summed gradients, before they are cast to the optimizer's dtype.
        is_shared: whether they travel through shared memory, from which rows are copied to where they belong.
    """

    places: tuple[int, ...]
    gather: Collective
    reduction: Collective | None
    whole: int
    gradients: int
    sums: int
    is_shared: bool

    @property
    def gathering(self) -> float:
        """Return the bytes of the gather's buffers: its input, and the rows of all ranks."""
        size, ranks = self.gather.input_bytes, self.gather.ranks
        return 0.0 if self.is_shared else size * (1 + ranks) if ranks > 1 else size

    @property
    def reducing(self) -> float:
        """Return the bytes of the reduction's buffers: its input, and the sums of a rank's rows."""
        assert self.reduction is not None
        size, ranks = self.reduction.input_bytes, self.reduction.ranks
        return 0.0 if self.is_shared else size * (1 + 1 / ranks) if ranks > 1 else size


class ZeroTraffic:
    """The collectives of ZeRO under a plan.

    Args:
        axes: axes of the plan.
        on_cpu: whether ranks compute on CPU, where a message has to fit a slot of shared memory.
    """

    def __init__(self, axes: PlanAxes, *, on_cpu: bool) -> None:
        self._axes, self._on_cpu = axes, on_cpu
        #: collectives by the ids of the parameters' kinds: equal units have equal ones
        self._flats_of: dict[tuple[int, ...], list[RowTraffic]] = {}

    def rows(self, params: Sequence[ParameterFacts]) -> list[RowTraffic]:
        """Return the traffic of a unit with these parameters."""
        key = tuple([id(param.kind) for param in params])
        if key not in self._flats_of:
            self._flats_of[key] = list(self._make(params))
        return self._flats_of[key]

    def _make(self, params: Sequence[ParameterFacts]) -> Iterator[RowTraffic]:
        together: dict[object, list[int]] = {}
        for place, param in enumerate(params):
            kind = param.kind
            key = self._axes.rows_of(kind.cut_axes), kind.sharded, kind.is_trainable
            together.setdefault(key, []).append(place)
        for places in together.values():
            over = self._axes.rows_of(params[places[0]].kind.cut_axes)
            ranks, limit = self._axes.size(over), shared_memory.piece_bytes() if self._on_cpu else None

            def nbytes(place: int, ranks: int = ranks) -> int:
                kind = params[place].kind
                wide = max(itemsize(kind.sharded[0]), itemsize(kind.sharded[2]))
                return (kind.elements + ranks * (len(kind.rows) * kind.row + 1)) * wide

            for chunk in chunks(places, nbytes, limit):
                yield self._flat(chunk, [params[place].kind for place in chunk], over)

    def _flat(self, places: Sequence[int], kinds: Sequence[ParameterKind], over: tuple[str, ...]) -> RowTraffic:
        ranks, name = self._axes.size(over), self._axes.name(over)
        computed, gradient, reduced, _ = kinds[0].sharded
        size = sum(rows_per_rank(kind, ranks) * kind.row for kind in kinds)
        gather = Collective("all_gather", name, ranks, size * itemsize(computed), computed, over)
        reduction = None
        if kinds[0].is_trainable:  # a flag for each parameter travels with its gradient
            nbytes = ranks * (size + len(kinds)) * itemsize(reduced)
            reduction = Collective("reduce_scatter", name, ranks, nbytes, reduced, over)
        elements = sum(kind.elements for kind in kinds)
        width = itemsize(gradient) if kinds[0].is_trainable else 0
        most = max(gather.input_bytes, reduction.input_bytes if reduction else 0)
        is_shared = self._on_cpu and ranks > 1 and most <= shared_memory.SLOT_BYTES
        return RowTraffic(
            tuple(places), gather, reduction, elements * itemsize(computed), elements * width, size * width, is_shared
        )


def together(units: Sequence[Unit]) -> list[Unit]:
    """Join small units that follow each other, as `colossus.data_parallel.zero.blocks.in_buckets` does.

    The units stay whole for a step. A joined unit has the block of its first.
    """

    def nbytes(unit: Unit) -> int:
        return sum(param.kind.elements * itemsize(param.kind.dtype) for param in unit[1])

    joined = chunks(units, nbytes, shared_memory.piece_bytes())
    return [(run[0][0], [param for _, params in run for param in params]) for run in joined]
