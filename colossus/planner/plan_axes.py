"""The axes over which a plan sums gradients and cuts rows, for parameters of a model built for its layout. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

from colossus.config import Config
from colossus.context.grid import RankGrid, build_grid
from colossus.registry import STRATEGIES

#: name for all data axes but the one that spreads experts: a layout does not know how a plan divides its data ranks
DATA = "data"


class PlanAxes:
    """The axes of a plan over which gradients are summed, and rows are cut.

    Attributes:
        grid: grid of the plan.
        summed: axes over which values of a step are summed: all, without data if the strategy is not exact.
        stage: effective stage of ZeRO. If no ranks share rows, parameters stay whole, and ZeRO only makes copies in the
            dtype of the optimizer.
        rows: axes with more than one rank over which ZeRO cuts rows.
    """

    def __init__(self, config: Config) -> None:
        parallel, precision = config.parallel, config.train.precision
        self.grid: RankGrid = build_grid(parallel)
        self._expanded = tuple(axis for axis in self.grid.axes("data") if axis not in self.grid.expert_axes)
        is_exact = STRATEGIES.build(parallel.data_strategy).exact
        data = self.grid.axes("data")
        self.summed = tuple(axis for axis in self.grid.names if is_exact or axis not in data)
        over = (*(axis for axis in data if axis != "replicate"), *self.grid.axes("sequence"))
        self.rows = tuple(axis for axis in over if self.grid.sizes[axis] > 1) if parallel.zero.stage else ()
        self.stage = parallel.zero.stage
        if not self.rows:
            is_one = precision.params == precision.optimizer and not (parallel.zero.stage and parallel.zero.offload)
            self.stage = 0 if is_one else min(self.stage, 2) or 2

    @property
    def stores_apart(self) -> bool:
        """Return whether the stored parameters are others than those that compute sees (ZeRO, or masters)."""
        return self.stage > 0

    def size(self, axes: Iterable[str]) -> int:
        return math.prod(self.grid.sizes[axis] for axis in axes)

    def name(self, axes: Iterable[str]) -> str:
        """Return the name under which bytes over these axes are counted."""
        return "x".join(axis for axis in axes if self.grid.sizes[axis] > 1)

    def sums(self, axes: Iterable[str], stored: Iterable[str] = ()) -> tuple[str, ...]:
        """Return the axes with more than one rank over which a gradient is all-reduced, in the order of the grid.

        Args:
            axes: axes of the layout over which the gradient is a sum.
            stored: axes over which its rows are cut, which a reduce-scatter sums.
        """
        wanted = {axis for name in axes for axis in (self._expanded if name == DATA else (name,))}
        wanted -= set(stored)
        return tuple(axis for axis in self.summed if axis in wanted and self.grid.sizes[axis] > 1)

    @cached_property
    def everywhere(self) -> tuple[str, ...]:
        """Return the axes with more than one rank over which the numbers of a step are summed."""
        return tuple(axis for axis in self.summed if self.grid.sizes[axis] > 1)

    def rows_of(self, cut: Iterable[str]) -> tuple[str, ...]:
        """Return the axes over which ZeRO cuts the rows of a parameter that is sharded over ``cut`` for compute."""
        return tuple(axis for axis in self.rows if axis not in cut)
