"""Which table a linear takes: of those its sizes fit, the one that moves fewest bytes. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from colossus.layers.tensor_mode import MatmulTable, Regions, TensorMode
from colossus.layers.traffic import matmul_traffic
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Misfit:
    """A size that does not divide as a table needs: ``size`` of ``what`` over the product of ``axes``."""

    what: str
    size: int
    axes: tuple[str, ...]
    ways: int

    def __str__(self) -> str:
        low, high = self.size // self.ways * self.ways, -(-self.size // self.ways) * self.ways
        ranks = f"the {self.ways} ranks of {' x '.join(self.axes)}"
        return f"{self.what} = {self.size} does not divide over {ranks}; {f'{low} or ' if low else ''}{high} does"


@dataclass(frozen=True)
class Tables:
    """The tables of a mode under one grid; axes of one rank are left out.

    Attributes:
        regions: as the layers see them.
        column, row: the ways to compute a linear of a pair.
        keep: whether x as gathered is kept for backward.
    """

    regions: Regions
    column: tuple[MatmulTable, ...]
    row: tuple[MatmulTable, ...]
    sizes: Sizes
    keep: bool = False

    @classmethod
    def of(
        cls, mode: type[TensorMode], door: Activation, sizes: Sizes, *, sequence_sharded: bool, keep: bool = False
    ) -> Tables:
        full = mode.regions(door, sequence_sharded=sequence_sharded)
        live = Regions(full.user.live(sizes), full.outer.live(sizes), full.inner.live(sizes))
        column, row = (
            tuple(dict.fromkeys(table.live(sizes) for table in mode.tables(split, full))) for split in ("column", "row")
        )
        return cls(live, column, row, sizes, keep)

    def ends(self, split: str | None) -> tuple[Activation, Activation]:
        """Between which layouts a linear goes by default."""
        user, outer, inner = self.regions.user, self.regions.outer, self.regions.inner
        return {"column": (outer, inner), "row": (inner, outer)}.get(split or "", (user, user))

    def candidates(self, split: str | None) -> tuple[MatmulTable, ...]:
        own = {"column": self.column, "row": self.row}.get(split or "")
        return own if own is not None else tuple(dict.fromkeys(self.column + self.row))

    def choose(
        self, split: str | None, in_features: int, parts: Mapping[str, int], *, padded: bool = False
    ) -> MatmulTable | list[Misfit]:
        """The table of a linear, or why none fits.

        Args:
            split: ``column``, ``row`` or None for a linear that stands alone.
            parts: name -> out_features of each output.
            padded: ``out_features`` need not divide: the last ranks are padded (a vocabulary).
        """
        source, target = self.ends(split)
        best: tuple[tuple[float, float], MatmulTable] | None = None
        reasons: list[Misfit] = []
        for table in self.candidates(split):
            if padded and table.y.features != target.features and split is not None:
                continue  # parts of a padded dim are not moved
            if len(parts) > 1 and set(table.y.partial) & set(target.features):
                continue  # a sum scattered over features would mix the outputs
            misfits = self._misfits(table, source, target, in_features, {} if padded else parts)
            if misfits:
                reasons = reasons or misfits
                continue
            # per token, without the weight, which costs the same either way
            moved = matmul_traffic(table, source, target, (self._rows, 1, in_features), sum(parts.values()), self.sizes)
            again = moved.x.there.elements
            once = sum((r.there + r.back).elements for r in (moved.x, moved.y))
            cost = once if self.keep else once + again, again  # of two that move the same, the one that gathers less
            if best is None or cost < best[0]:
                best = cost, table
        return reasons if best is None else best[1]

    @property
    def _rows(self) -> int:
        return math.prod(self.sizes.values())

    def _misfits(
        self, table: MatmulTable, source: Activation, target: Activation, in_features: int, parts: Mapping[str, int]
    ) -> list[Misfit]:
        needs: dict[tuple[str, int, tuple[str, ...]], None] = {}
        for axes in (source.features, table.x.features, table.weight.dims[1], table.weight_used.dims[1]):
            needs["in_features", in_features, axes] = None
        for part, out in parts.items():
            name = f"out_features ({part})" if part else "out_features"
            for axes in (target.features, table.y.features, table.weight.dims[0], table.weight_used.dims[0]):
                needs[name, out, axes] = None
        misfits = [Misfit(what, size, axes, self.ways(axes)) for what, size, axes in needs if size % self.ways(axes)]
        return list({(misfit.what, misfit.ways): misfit for misfit in misfits}.values())  # two axes may ask the same

    def ways(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)


def whole(regions: Regions) -> MatmulTable:
    """Every rank the whole matmul of what it holds in the user layout: for a lone linear that does not divide."""
    return MatmulTable(x=regions.user, weight=Layout.whole(2), weight_used=Layout.whole(2), y=regions.user)
