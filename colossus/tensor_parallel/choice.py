"""Which sharding a linear takes: of those its sizes fit, the one that moves fewest bytes. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from colossus.arithmetic import either, nearest_multiples
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.tensor_parallel.mode import MatmulSharding, Regions, TensorMode
from colossus.tensor_parallel.traffic import matmul_traffic

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Misfit:
    """A size that does not divide as a sharding needs: ``size`` of ``what`` over the product of ``axes``."""

    what: str
    size: int
    axes: tuple[str, ...]
    ways: int

    @property
    def ranks(self) -> str:
        return f"the {self.ways} ranks of {' x '.join(self.axes)}"

    def __str__(self) -> str:
        near = either(nearest_multiples(self.size, self.ways))
        return f"{self.what} = {self.size} does not divide over {self.ranks}; {near} does"


@dataclass(frozen=True)
class Shardings:
    """The shardings of a mode under one grid; axes of one rank are left out.

    Attributes:
        regions: as the layers see them.
        column, row: the ways to compute a linear of a pair.
        keep: whether x as gathered is kept for backward.
    """

    regions: Regions
    column: tuple[MatmulSharding, ...]
    row: tuple[MatmulSharding, ...]
    sizes: Sizes
    keep: bool = False

    @classmethod
    def of(
        cls, mode: type[TensorMode], inputs: Activation, sizes: Sizes, *, sequence_sharded: bool, keep: bool = False
    ) -> Shardings:
        full = mode.regions(inputs, sequence_sharded=sequence_sharded)
        live = Regions(
            full.user.drop_trivial_axes(sizes), full.outer.drop_trivial_axes(sizes), full.inner.drop_trivial_axes(sizes)
        )
        column, row = (
            tuple(dict.fromkeys(sharding.drop_trivial_axes(sizes) for sharding in mode.shardings(split, full)))
            for split in ("column", "row")
        )
        return cls(live, column, row, sizes, keep)

    def ends(self, split: str | None) -> tuple[Activation, Activation]:
        """Between which layouts a linear goes by default."""
        user, outer, inner = self.regions.user, self.regions.outer, self.regions.inner
        return {"column": (outer, inner), "row": (inner, outer)}.get(split or "", (user, user))

    def candidates(self, split: str | None) -> tuple[MatmulSharding, ...]:
        own = {"column": self.column, "row": self.row}.get(split or "")
        return own if own is not None else tuple(dict.fromkeys(self.column + self.row))

    def choose(
        self, split: str | None, in_features: int, parts: Mapping[str, int], *, padded: bool = False
    ) -> MatmulSharding | list[Misfit]:
        """The sharding of a linear, or why none fits.

        Args:
            split: ``column``, ``row`` or None for a linear that stands alone.
            parts: name -> out_features of each output.
            padded: ``out_features`` need not divide: the last ranks are padded (a vocabulary).
        """
        source, target = self.ends(split)
        best: tuple[tuple[float, float], MatmulSharding] | None = None
        reasons: list[Misfit] = []
        for sharding in self.candidates(split):
            if padded and sharding.y.features != target.features and split is not None:
                continue  # parts of a padded dim are not moved
            if len(parts) > 1 and set(sharding.y.partial) & set(target.features):
                continue  # a sum scattered over features would mix the outputs
            misfits = self._misfits(sharding, source, target, in_features, {} if padded else parts)
            if misfits:
                reasons = reasons or misfits
                continue
            # per token, without the weight, which costs the same either way
            moved = matmul_traffic(
                sharding, source, target, (self._rows, 1, in_features), sum(parts.values()), self.sizes
            )
            again = moved.x.forward.elements
            once = sum((r.forward + r.backward).elements for r in (moved.x, moved.y))
            cost = once if self.keep else once + again, again  # of two that move the same, the one that gathers less
            if best is None or cost < best[0]:
                best = cost, sharding
        return reasons if best is None else best[1]

    @property
    def _rows(self) -> int:
        return math.prod(self.sizes.values())

    def _misfits(
        self,
        sharding: MatmulSharding,
        source: Activation,
        target: Activation,
        in_features: int,
        parts: Mapping[str, int],
    ) -> list[Misfit]:
        needs: dict[tuple[str, int, tuple[str, ...]], None] = {}
        for axes in (source.features, sharding.x.features, sharding.weight.dims[1], sharding.weight_used.dims[1]):
            needs["in_features", in_features, axes] = None
        for part, out in parts.items():
            name = f"out_features ({part})" if part else "out_features"
            for axes in (target.features, sharding.y.features, sharding.weight.dims[0], sharding.weight_used.dims[0]):
                needs[name, out, axes] = None
        misfits = [Misfit(what, size, axes, self.ways(axes)) for what, size, axes in needs if size % self.ways(axes)]
        return list({(misfit.what, misfit.ways): misfit for misfit in misfits}.values())  # two axes may ask the same

    def ways(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)


def whole(regions: Regions) -> MatmulSharding:
    """Every rank the whole matmul of what it holds in the user layout: for a lone linear that does not divide."""
    return MatmulSharding(x=regions.user, weight=Layout.whole(2), weight_used=Layout.whole(2), y=regions.user)
