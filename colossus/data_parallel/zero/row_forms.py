"""The rows into which ZeRO cuts parameters, and those that travel together, as functions of sizes and dtypes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from colossus.comm.flat_buffer import chunks
from colossus.context.grid import RankGrid
from colossus.context.precision import LOW, Precision
from colossus.layout.parameter import spec_of
from colossus.layout.split_parameter import local_shape


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of a parameter.

    Attributes:
        computed: the dtype of the gathered parameter, in which it also travels.
        gradient: the dtype in which its gradients are accumulated.
        reduced: the dtype in which they are summed over ranks.
        stored: the dtype of the rows that the optimizer updates.
    """

    computed: torch.dtype
    gradient: torch.dtype
    reduced: torch.dtype
    stored: torch.dtype

    @classmethod
    def of(cls, param: nn.Parameter, precision: Precision, *, is_product: bool) -> Dtypes:
        """Return the dtypes under the precision of a run; a parameter with a wide dtype of its own keeps it.

        Args:
            param: the parameter.
            precision: the precision of the run.
            is_product: whether it is used in products only, which run in the dtype of compute.
        """
        is_usual = param.dtype == precision.params
        computed = precision.compute if precision.is_low and is_product and is_usual else param.dtype
        gradient = precision.gradients if computed in LOW else computed
        stored = precision.optimizer if is_usual or param.dtype in LOW else param.dtype
        return cls(computed, gradient, precision.reduce_dtype(gradient), stored)

    def allow_views(self, stage: int, *, offload: bool) -> bool:
        """Return whether rows are views of the whole parameters: these keep their memory, and need no cast."""
        return stage < 3 and not offload and self.computed == self.stored


@dataclass(frozen=True)
class RowForm:
    """The form of a parameter whose rows ranks share.

    Attributes:
        shape: its shape on a rank, before its rows are cut.
        shards: rows of each logical parameter in it, in dim 0.
        dtypes: its dtypes.
        cut_axes: axes that shard it for compute; its rows are cut over others.
        is_trainable: whether it gets a gradient.
    """

    shape: tuple[int, ...]
    shards: tuple[int, ...]
    dtypes: Dtypes
    cut_axes: frozenset[str]
    is_trainable: bool

    @classmethod
    def of(cls, param: nn.Parameter, precision: Precision, *, is_product: bool) -> RowForm:
        """Return the form of a parameter; see `Dtypes.of`."""
        spec = spec_of(param)
        return cls(
            tuple(local_shape(param)),
            tuple(stop - start for start, stop in (shard.rows for shard in spec.shards)),
            Dtypes.of(param, precision, is_product=is_product),
            frozenset(spec.layout.shard_axes),
            param.requires_grad,
        )

    @cached_property
    def elements(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def row(self) -> int:
        """Return the elements of a row."""
        return math.prod(self.shape[1:])

    def axes_of_rows(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return those of these axes over which its rows are cut."""
        return tuple(axis for axis in axes if axis not in self.cut_axes)

    def rows_on(self, ranks: int) -> int:
        """Return the rows that each of ``ranks`` ranks stores, with padding."""
        return sum(rows_per_rank(rows, ranks) for rows in self.shards)


def rows_per_rank(rows: int, ranks: int) -> int:
    """Return the rows of a logical parameter that each of ``ranks`` ranks stores; the last ones may have padding."""
    return -(-rows // ranks)


def axes_of_zero(grid: RankGrid) -> tuple[str, ...]:
    """Return the axes along which ranks share rows under ZeRO; replicas of HSDP have their own."""
    return (*(axis for axis in grid.axes("data") if axis != "replicate"), *grid.axes("sequence"))


def stage_in_effect(stage: int, ranks: int, *, is_copied: bool) -> int:
    """Return the stage of ZeRO over ``ranks`` ranks; 0 if the optimizer updates the parameters that compute sees.

    Args:
        stage: the stage that is asked for.
        ranks: the number of ranks that share rows.
        is_copied: whether the stored rows are in another dtype or memory than the parameters that compute sees.
    """
    return stage if ranks > 1 else min(stage, 2) * is_copied


def rows_together(
    forms: Sequence[RowForm], axes: Iterable[str], sizes: Mapping[str, int], flat_limit: int | None
) -> list[list[int]]:
    """Return the indices of the parameters of each collective, which have the same ranks and dtypes.

    Args:
        forms: the parameters.
        axes: the axes over which rows are cut.
        sizes: ranks along each axis.
        flat_limit: see `colossus.comm.shared_memory.flat_limit`.
    """
    kinds: dict[tuple[tuple[str, ...], Dtypes, bool], list[int]] = {}
    for index, form in enumerate(forms):
        kinds.setdefault((form.axes_of_rows(axes), form.dtypes, form.is_trainable), []).append(index)
    together: list[list[int]] = []
    for (over, dtypes, _), indices in kinds.items():
        ranks, wide = math.prod(sizes[axis] for axis in over), max(dtypes.computed.itemsize, dtypes.reduced.itemsize)

        def nbytes(index: int, ranks: int = ranks, wide: int = wide) -> int:
            form = forms[index]  # with the padding of each rank's last rows, and a flag
            return (form.elements + ranks * (len(form.shards) * form.row + 1)) * wide

        together += chunks(indices, nbytes, flat_limit)
    return together
