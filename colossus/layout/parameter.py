"""What a parameter of a layer stands for: logical parameters with full shapes, layouts and initial values.

A rank holds one local buffer per parameter. Fused layers keep several logical parameters in it (query, key and value),
one after the other in dim 0; everywhere else there is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from colossus.context.program import Subject
from colossus.error_place import located_error
from colossus.layout.layout import Box, Layout


class Initializer(Protocol):
    """Draws the values of a box of a tensor, float64 ``[stop - start for each dim]``.

    They depend on the key, the full shape and the box alone, and where two boxes overlap both have the same values.
    """

    def __call__(self, key: int, shape: tuple[int, ...], box: Box) -> np.ndarray[Any, np.dtype[np.float64]]: ...


@dataclass(frozen=True)
class LogicalShard:
    """This rank's shard of one logical parameter: a slice of the local buffer in dim 0.

    Attributes:
        name: within the module (``query``), empty when the buffer has one shard.
        shape: full shape of the logical parameter.
        init: draws the initial value; None where a constructor gives it (a plain parameter's).
        rows: rows of dim 0 of the local buffer, (start, stop).
    """

    name: str
    shape: tuple[int, ...]
    init: Initializer | None
    rows: tuple[int, int]


class ParameterSpec:
    """What a parameter stands for: every parameter of a model has one (`spec_of`), those of plain torch modules too.

    Attributes:
        shards: what the local buffer holds, in the order of its rows.
        description: what errors call the parameter before it has a name.
        layout: of the full shape of each shard: all are placed alike.
        name: full name in the model, set by `colossus.build`.
        gradient_axes: axes over which the gradient of the local buffer is a partial sum; None before the first use.
        is_decided: whether ``gradient_axes`` is known before the first use.
        computed_dtype: as what rows of it become activations, where it is itself stored as wide as the optimizer's
            state and other parameters are not; else None.
        gradient_dtype: of its gradients, where it is not the parameter's own; else None.
        is_plain: whether the parameter is a plain torch one: stored whole, its values those that the constructor gave
            it, in the whole layout wherever it is used.
        is_stack: whether dim 0 counts matrices (one for each expert), each of which an optimizer looks at by itself.
        intervals: of the one shard, which rows of its dim 0 this rank holds: (start, stop) of each range, ascending,
            one below the other in the local buffer; None: those that the layout says.
    """

    intervals: tuple[tuple[int, int], ...] | None = None
    is_stack = False

    def __init__(
        self, shards: tuple[LogicalShard, ...], layout: Layout, description: str, *, is_plain: bool = False
    ) -> None:
        self.shards, self.layout = shards, layout
        self.description = description
        self.name = ""
        self._recorded: tuple[str, ...] | None = None
        self.is_decided = self.is_plain = is_plain
        self.computed_dtype: torch.dtype | None = None
        self.gradient_dtype: torch.dtype | None = None

    @classmethod
    def plain(cls, shape: tuple[int, ...]) -> ParameterSpec:
        """Of a parameter that no layer of ours has made, by its shape."""
        shard = LogicalShard("", shape, None, (0, shape[0] if shape else 1))
        return cls((shard,), Layout.whole(len(shape)), f"plain parameter of shape {shape}", is_plain=True)

    @cached_property
    def subject(self) -> Subject:
        """The parameter as what a collective is of; asked for once it has its name."""
        return Subject([self.name or self.description])

    @property
    def num_elements(self) -> int:
        """Elements of all logical shards, whatever the plan."""
        return sum(math.prod(shard.shape) for shard in self.shards)

    def boxes(self, shard: LogicalShard, sizes: Mapping[str, int], at: Mapping[str, int]) -> tuple[Box, ...]:
        """The boxes of a logical shard at coordinates ``at``, this rank's: one below the other in its local rows.

        Rows of the local buffer behind the last are padding.
        """
        box = self.layout.box(shard.shape, sizes, at)
        if self.intervals is None:
            return (box,)
        return tuple((interval, *box[1:]) for interval in self.intervals)

    @property
    def gradient_axes(self) -> tuple[str, ...] | None:
        return self._recorded

    def record(self, axes: tuple[str, ...]) -> None:
        """Note over which axes this use leaves the gradient partial; ValueError when an earlier use did over others."""
        if self._recorded is None:
            self._recorded = axes
        elif set(self._recorded) != set(axes):
            one, other = (f"({', '.join(each)})" if each else "no axis" for each in (self._recorded, axes))
            raise located_error(
                f"parameter {self.name or self.description} is used under two layouts: its gradient is partial over "
                f"{one} at one use and over {other} at another. Use it in one region only, or give each region its own "
                f"parameter."
            )


class StoredSpec(ParameterSpec):
    """Of a parameter whose rows are cut over more ``axes`` for storage than for compute (ZeRO, tables with owners)."""

    def __init__(self, computed: ParameterSpec, axes: tuple[str, ...], sizes: Mapping[str, int]) -> None:
        layout = replace(computed.layout, stored=axes)
        rows = local_rows([shard.shape for shard in computed.shards], layout, sizes)
        shards = (replace(shard, rows=span) for shard, span in zip(computed.shards, rows, strict=True))
        super().__init__(tuple(shards), layout, computed.description, is_plain=computed.is_plain)
        self.name, self.is_decided, self._computed = computed.name, computed.is_decided, computed
        self.is_stack = computed.is_stack

    def place(self, intervals: Sequence[tuple[int, int]]) -> None:
        """Let this rank hold these row ranges of the one shard, ascending: the local buffer has no other rows."""
        (shard,) = self.shards
        self.intervals = tuple(intervals)
        self.shards = (replace(shard, rows=(0, sum(stop - start for start, stop in self.intervals))),)

    @property
    def gradient_axes(self) -> tuple[str, ...] | None:
        """Of the computed parameter, those included over which it is cut."""
        return self._computed.gradient_axes

    def record(self, axes: tuple[str, ...]) -> None:
        self._computed.record(axes)


def spec_of(parameter: Tensor) -> ParameterSpec:
    """The spec of a parameter; one that no layer of ours has made gets that of a plain parameter."""
    spec: ParameterSpec | None = getattr(parameter, "_colossus_spec", None)
    if spec is None:
        spec = ParameterSpec.plain(tuple(parameter.shape))
        parameter._colossus_spec = spec  # type: ignore[attr-defined]
    return spec


def made_by_layer(tensor: Tensor) -> bool:
    spec: ParameterSpec | None = getattr(tensor, "_colossus_spec", None)
    return spec is not None and not spec.is_plain


def attach(parameter: nn.Parameter, spec: ParameterSpec) -> nn.Parameter:
    parameter._colossus_spec = spec  # type: ignore[attr-defined]
    return parameter


def rows_of(parameter: Tensor) -> list[tuple[int, int]]:
    """Rows of each logical shard in the local buffer of a parameter."""
    return [shard.rows for shard in spec_of(parameter).shards]


@dataclass(frozen=True)
class LogicalParameter:
    """A logical parameter of a model and where this rank's shard of it lives.

    Attributes:
        name: full logical name (``blocks.0.attention.query.weight``).
        parameter_name: full name of the torch parameter that holds it (``blocks.0.attention.qkv.weight``).
        shape: full shape.
        layout: how the full shape is sharded.
        parameter: the torch parameter; its shape is the rank's.
        rows: of the parameter's dim 0, (start, stop); None for all of it.
        shard_name: within the parameter; empty where it holds no other.
        intervals: as of `ParameterSpec`.
    """

    name: str
    parameter_name: str
    shape: tuple[int, ...]
    layout: Layout
    parameter: nn.Parameter
    rows: tuple[int, int] | None
    shard_name: str = ""
    intervals: tuple[tuple[int, int], ...] | None = None

    def local(self, buffer: Tensor | None = None) -> Tensor:
        """The rank's shard (a view) of the parameter, or of ``buffer``, a tensor of its shape (its gradient, say)."""
        source = self.parameter if buffer is None else buffer
        return source if self.rows is None else source[self.rows[0] : self.rows[1]]


def logical_name(parameter_name: str, shard_name: str) -> str:
    """``attention.qkv.weight`` and ``query``: ``attention.qkv.query.weight``."""
    module, _, leaf = parameter_name.rpartition(".")
    return ".".join(filter(None, (module, shard_name, leaf)))


def logical_parameters(model: nn.Module, *, keep_ties: bool = False) -> Iterator[LogicalParameter]:
    """Every logical parameter of a model, in the order of ``named_parameters``; with ``keep_ties`` under each name."""
    for name, parameter in model.named_parameters(remove_duplicate=not keep_ties):
        spec = spec_of(parameter)
        for shard in spec.shards:
            path = logical_name(name, shard.name)
            rows = shard.rows if len(spec.shards) > 1 else None
            yield LogicalParameter(path, name, shard.shape, spec.layout, parameter, rows, shard.name, spec.intervals)


def record_full_order(model: nn.Module) -> None:
    """Keep the order of the parameters and buffers of a whole model, before a stage drops those of other stages."""
    vars(model)["_colossus_order"] = _names_in_order(model)


def full_model_order(model: nn.Module) -> dict[str, int]:
    """Number of every parameter and buffer in the whole model, by each full name; parameters come first."""
    return {name: number for number, name in enumerate(vars(model).get("_colossus_order") or _names_in_order(model))}


def _names_in_order(model: nn.Module) -> tuple[str, ...]:
    names = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    return tuple(name for each in names for name, _ in each)


def num_parameters(model: nn.Module) -> int:
    """Elements of the whole model, each logical parameter counted once, whatever the plan."""
    return sum(math.prod(logical.shape) for logical in logical_parameters(model))


def local_rows(shapes: Sequence[Sequence[int]], layout: Layout, sizes: Mapping[str, int]) -> list[tuple[int, int]]:
    """Rows (start, stop) of each logical parameter in a fused local buffer, from full shapes and their layout."""
    rows, start = [], 0
    for shape in shapes:
        stop = start + layout.chunk(shape, sizes)[0]
        rows.append((start, stop))
        start = stop
    return rows
