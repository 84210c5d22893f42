"""The meaning of a layer's parameter: logical parameters with full shapes, layouts and initial values.

A rank has one local buffer per parameter. Fused layers store several logical parameters in it (query, key and value),
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
    """A function that draws the values of a box of a tensor, float64 ``[stop - start for each dim]``.

    The values depend only on the key, the full shape and the box, and where two boxes overlap both have the same
    values.
    """

    def __call__(self, key: int, shape: tuple[int, ...], box: Box) -> np.ndarray[Any, np.dtype[np.float64]]: ...


@dataclass(frozen=True)
class LogicalShard:
    """This rank's shard of one logical parameter: a slice of the local buffer in dim 0.

    Attributes:
        name: name within the module (``query``), empty when the buffer has one shard.
        shape: full shape of the logical parameter.
        init: draws the initial value; None if a constructor sets it (a plain parameter's).
        rows: rows of dim 0 of the local buffer, (start, stop).
    """

    name: str
    shape: tuple[int, ...]
    init: Initializer | None
    rows: tuple[int, int]


class ParameterSpec:
    """The meaning of a parameter. Every parameter of a model has a spec (`spec_of`), those of plain torch modules too.

    Attributes:
        shards: the shards in the local buffer, in the order of its rows.
        description: name of the parameter in errors before it has a name.
        layout: layout of the full shape of each shard: all have the same.
        name: full name in the model, set by `colossus.build`.
        gradient_axes: axes over which the gradient of the local buffer is a partial sum; None before the first use.
        is_decided: ``gradient_axes`` is known before the first use.
        computed_dtype: dtype in which its rows become activations, if it is stored as wide as the optimizer's state and
            other parameters are not; else None.
        gradient_dtype: dtype of its gradients, if it is not the parameter's own; else None.
        is_plain: the parameter is a plain torch one: stored whole, its values are those of the constructor, and it is
            used in the whole layout.
        is_stack: dim 0 counts matrices (one for each expert), and an optimizer treats each by itself.
        intervals: rows of dim 0 of the only shard that this rank has: (start, stop) of each range, ascending,
            consecutive in the local buffer; None: the rows of the layout.
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
        """Return the spec of a parameter that no layer of ours has made, by its shape."""
        shard = LogicalShard("", shape, None, (0, shape[0] if shape else 1))
        return cls((shard,), Layout.whole(len(shape)), f"plain parameter of shape {shape}", is_plain=True)

    @cached_property
    def subject(self) -> Subject:
        """The parameter as the subject of a collective; it is made once the parameter has its name."""
        return Subject([self.name or self.description])

    @cached_property
    def whole_shape(self) -> torch.Size:
        """The shape of all logical shards, concatenated along dim 0, under any plan."""
        (*_, last) = shapes = [shard.shape for shard in self.shards]
        return torch.Size((sum(shape[0] for shape in shapes), *last[1:]) if last else ())

    @property
    def num_elements(self) -> int:
        """Elements of all logical shards, under any plan."""
        return sum(math.prod(shard.shape) for shard in self.shards)

    def boxes(self, shard: LogicalShard, sizes: Mapping[str, int], at: Mapping[str, int]) -> tuple[Box, ...]:
        """Return the boxes of a logical shard at coordinates ``at``, this rank's, consecutive in its local rows.

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
        """Record the axes over which a use leaves the gradient partial; ValueError if an earlier use had others."""
        if self._recorded is None:
            self._recorded = axes
        elif set(self._recorded) != set(axes):
            one, other = (f"({', '.join(names)})" if names else "no axis" for names in (self._recorded, axes))
            raise located_error(
                f"parameter {self.name or self.description} is used under two layouts: its gradient is partial over "
                f"{one} at one use and over {other} at another. Use it in one region only, or give each region its own "
                f"parameter."
            )


class StoredSpec(ParameterSpec):
    """The spec of a parameter whose rows are cut over more ``axes`` for storage than for compute.

    ZeRO and tables with owners have such parameters.
    """

    def __init__(self, computed: ParameterSpec, axes: tuple[str, ...], sizes: Mapping[str, int]) -> None:
        layout = replace(computed.layout, stored=axes)
        rows = local_rows([shard.shape for shard in computed.shards], layout, sizes)
        shards = (replace(shard, rows=span) for shard, span in zip(computed.shards, rows, strict=True))
        super().__init__(tuple(shards), layout, computed.description, is_plain=computed.is_plain)
        self.name, self.is_decided, self._computed = computed.name, computed.is_decided, computed
        self.is_stack = computed.is_stack

    def place(self, intervals: Sequence[tuple[int, int]]) -> None:
        """Let this rank store these row ranges of the only shard, ascending: the local buffer has no other rows."""
        (shard,) = self.shards
        self.intervals = tuple(intervals)
        self.shards = (replace(shard, rows=(0, sum(stop - start for start, stop in self.intervals))),)

    @property
    def gradient_axes(self) -> tuple[str, ...] | None:
        """The axes of the computed parameter, including those over which it is cut."""
        return self._computed.gradient_axes

    def record(self, axes: tuple[str, ...]) -> None:
        self._computed.record(axes)


def spec_of(parameter: Tensor) -> ParameterSpec:
    """Return the spec of a parameter; a parameter that no layer of ours has made gets the spec of a plain one."""
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
    """Return the rows of each logical shard in the local buffer of a parameter."""
    return [shard.rows for shard in spec_of(parameter).shards]


@dataclass(frozen=True)
class LogicalParameter:
    """A logical parameter of a model and the place of this rank's shard of it.

    Attributes:
        name: full logical name (``blocks.0.attention.query.weight``).
        parameter_name: full name of the torch parameter that contains it (``blocks.0.attention.qkv.weight``).
        shape: full shape.
        layout: layout of the full shape.
        parameter: the torch parameter; its shape is the rank's.
        rows: its rows in the parameter's dim 0, (start, stop); None for all of it.
        shard_name: name within the parameter; empty if it is the only one.
        intervals: see `ParameterSpec`.
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
        """Return the rank's shard (a view) of the parameter, or of ``buffer``, a tensor of its shape."""
        source = self.parameter if buffer is None else buffer
        return source if self.rows is None else source[self.rows[0] : self.rows[1]]


def logical_name(parameter_name: str, shard_name: str) -> str:
    """Return ``attention.qkv.query.weight`` for ``attention.qkv.weight`` and ``query``."""
    module, _, leaf = parameter_name.rpartition(".")
    return ".".join(filter(None, (module, shard_name, leaf)))


def logical_parameters(model: nn.Module, *, keep_ties: bool = False) -> Iterator[LogicalParameter]:
    """Yield every logical parameter of a model, in the order of ``named_parameters``.

    Args:
        keep_ties: yield a tied parameter under each of its names.
    """
    for name, parameter in model.named_parameters(remove_duplicate=not keep_ties):
        spec = spec_of(parameter)
        for shard in spec.shards:
            path = logical_name(name, shard.name)
            rows = shard.rows if len(spec.shards) > 1 else None
            yield LogicalParameter(path, name, shard.shape, spec.layout, parameter, rows, shard.name, spec.intervals)


def reference_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of names in frozen models inside a model (`colossus.models.reference`)."""
    return tuple(f"{name}." for name, part in model.named_modules() if name and getattr(part, "is_reference", False))


def record_full_order(model: nn.Module) -> None:
    """Record the order of the parameters and buffers of a whole model, before a stage drops those of other stages."""
    vars(model)["_colossus_order"] = _names_in_order(model)


def full_model_order(model: nn.Module) -> dict[str, int]:
    """Return the number of every parameter and buffer in the whole model, by each full name; parameters come first."""
    return {name: number for number, name in enumerate(vars(model).get("_colossus_order") or _names_in_order(model))}


def _names_in_order(model: nn.Module) -> tuple[str, ...]:
    both = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    return tuple(name for named in both for name, _ in named)


def num_parameters(model: nn.Module) -> int:
    """Return the elements of the whole model, each logical parameter counted once, under any plan."""
    other = reference_prefixes(model)
    return sum(math.prod(logical.shape) for logical in logical_parameters(model) if not logical.name.startswith(other))


def local_rows(shapes: Sequence[Sequence[int]], layout: Layout, sizes: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return the rows (start, stop) of each logical parameter in a fused local buffer, from full shapes and layout."""
    rows, start = [], 0
    for shape in shapes:
        stop = start + layout.chunk(shape, sizes)[0]
        rows.append((start, stop))
        start = stop
    return rows
