"""The choice of a linear's sharding: among those that divide its sizes, the one that moves fewest bytes. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from colossus.arithmetic import either, nearest_multiples
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.tensor_parallel.mode import AxisSizes, MatmulSharding, Regions, TensorMode
from colossus.tensor_parallel.traffic import matmul_traffic


@dataclass(frozen=True)
class IndivisibleSize:
    """A size that a sharding cannot split: ``size`` of dim ``name`` over the ``ways`` ranks of ``axes``."""

    name: str
    size: int
    axes: tuple[str, ...]
    ways: int

    @property
    def ranks(self) -> str:
        return f"the {self.ways} ranks of {' x '.join(self.axes)}"

    def __str__(self) -> str:
        near = either(nearest_multiples(self.size, self.ways))
        return f"{self.name} = {self.size} does not divide over {self.ranks}; {near} does"


@dataclass(frozen=True)
class Shardings:
    """The shardings of a mode under one grid; axes of one rank are left out.

    Attributes:
        regions: the layouts of activations.
        column, row: the shardings that a column linear and a row linear can take.
        sizes: ranks along each axis.
        keep: backward reuses gathered inputs.
    """

    regions: Regions
    column: tuple[MatmulSharding, ...]
    row: tuple[MatmulSharding, ...]
    sizes: AxisSizes
    keep: bool = False

    @classmethod
    def of(
        cls, mode: type[TensorMode], inputs: Activation, sizes: AxisSizes, *, sequence_sharded: bool, keep: bool = False
    ) -> Shardings:
        full = mode.regions(inputs, sequence_sharded=sequence_sharded)
        whole, residual, inner = (region.drop_trivial_axes(sizes) for region in (full.whole, full.residual, full.inner))
        column, row = (
            tuple(dict.fromkeys(sharding.drop_trivial_axes(sizes) for sharding in mode.shardings(split, full)))
            for split in ("column", "row")
        )
        return cls(Regions(whole, residual, inner), column, row, sizes, keep)

    def default_layouts(self, split: str | None) -> tuple[Activation, Activation]:
        """Return the layouts of x before and of y after a linear, unless its caller wants others."""
        whole, residual, inner = self.regions.whole, self.regions.residual, self.regions.inner
        return {"column": (residual, inner), "row": (inner, residual)}.get(split or "", (whole, whole))

    def candidates(self, split: str | None) -> tuple[MatmulSharding, ...]:
        """Return the shardings that a linear can take, regardless of its sizes."""
        own = {"column": self.column, "row": self.row}.get(split or "")
        return own if own is not None else tuple(dict.fromkeys(self.column + self.row))

    def choose(
        self, split: str | None, in_features: int, outputs: Mapping[str, int], *, padded: bool = False
    ) -> MatmulSharding | list[IndivisibleSize]:
        """Return the sharding of a linear, or the sizes that do not divide, where none fits.

        Args:
            split: ``column``, ``row`` or None for a linear outside a pair.
            outputs: name -> out_features of each output; one output may be named "".
            padded: ``out_features`` need not divide: the last ranks are padded (a vocabulary).
        """
        source, target = self.default_layouts(split)
        best: tuple[tuple[float, float], MatmulSharding] | None = None
        problems: list[IndivisibleSize] = []
        for sharding in self.candidates(split):
            if padded and sharding.y.features != target.features and split is not None:
                continue  # a padded dim cannot be moved to other ranks
            if len(outputs) > 1 and set(sharding.y.partial) & set(target.features):
                continue  # a sum scattered over features would mix the outputs
            indivisible = self._indivisible(sharding, source, target, in_features, {} if padded else outputs)
            if indivisible:
                problems = problems or indivisible
                continue
            # traffic for one token, without the weight, which costs the same in all shardings
            moved = matmul_traffic(
                sharding, source, target, (self._rows, 1, in_features), sum(outputs.values()), self.sizes
            )
            gathered = moved.x.forward.elements
            sent = sum((operand.forward + operand.backward).elements for operand in (moved.x, moved.y))
            sent += 0.0 if self.keep else gathered  # backward gathers x again
            if best is None or (sent, gathered) < best[0]:  # a tie goes to the one that gathers less
                best = (sent, gathered), sharding
        return problems if best is None else best[1]

    @property
    def _rows(self) -> int:
        """A number of rows that every sharding divides."""
        return math.prod(self.sizes.values())

    def _indivisible(
        self,
        sharding: MatmulSharding,
        source: Activation,
        target: Activation,
        in_features: int,
        outputs: Mapping[str, int],
    ) -> list[IndivisibleSize]:
        def misfits(name: str, size: int, *splits: tuple[str, ...]) -> dict[tuple[str, int], IndivisibleSize]:
            ways = {axes: self.ways(axes) for axes in splits}
            return {(name, n): IndivisibleSize(name, size, axes, n) for axes, n in ways.items() if size % n}

        weight, gathered = sharding.weight.dims, sharding.gathered_weight.dims
        problems = misfits("in_features", in_features, source.features, sharding.x.features, weight[1], gathered[1])
        for output, out in outputs.items():
            name = f"out_features ({output})" if output else "out_features"
            problems |= misfits(name, out, target.features, sharding.y.features, weight[0], gathered[0])
        return list(problems.values())  # one problem for each number of ranks

    def ways(self, axes: Sequence[str]) -> int:
        """Return the ranks along the product of axes."""
        return math.prod(self.sizes[axis] for axis in axes)


def unsharded(regions: Regions) -> MatmulSharding:
    """Return a replicated weight, x and y whole: for a linear outside a pair whose sizes do not divide."""
    return MatmulSharding(x=regions.whole, weight=Layout.whole(2), gathered_weight=Layout.whole(2), y=regions.whole)
