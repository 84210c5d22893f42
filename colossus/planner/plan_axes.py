"""The axes of a plan, as the parameters of a model that was built for its layout meet them. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

from colossus.config import Config
from colossus.context.grid import RankGrid, build_grid
from colossus.registry import STRATEGIES

#: stands for all axes of data but the one along which experts are spread: how a plan cuts data is not the layout's
DATA = "data"


class PlanAxes:
    """Over which ranks of a plan gradients are summed, and rows are cut.

    Attributes:
        grid: of the plan.
        stage: of ZeRO as it is done: where no ranks share rows, parameters stay whole, and what is left of it are
            copies in the dtype of the optimizer.
        rows: the axes over which ZeRO cuts rows, those of one rank left out.
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

    def size(self, axes: Iterable[str]) -> int:
        return math.prod(self.grid.sizes[axis] for axis in axes)

    def name(self, axes: Iterable[str]) -> str:
        """As what bytes over these axes are counted."""
        return "x".join(axis for axis in axes if self.grid.sizes[axis] > 1)

    def sums(self, axes: Iterable[str], stored: Iterable[str] = ()) -> tuple[str, ...]:
        """The axes over which a gradient is summed, that is a sum over ``axes`` (of a layout) and whose rows are cut
        over ``stored``: of more than one rank, in the order of the grid."""
        wanted = {axis for each in axes for axis in (self._expanded if each == DATA else (each,))}
        wanted -= set(stored)
        return tuple(axis for axis in self.summed if axis in wanted and self.grid.sizes[axis] > 1)

    @cached_property
    def everywhere(self) -> tuple[str, ...]:
        """Over which the numbers of a step are summed."""
        return tuple(axis for axis in self.summed if self.grid.sizes[axis] > 1)

    def rows_of(self, cut: Iterable[str]) -> tuple[str, ...]:
        """The axes over which the rows of a parameter are cut that ``cut`` cut for compute."""
        return tuple(axis for axis in self.rows if axis not in cut)
