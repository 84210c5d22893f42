"""What a parameter's local buffer means: its logical shards, their full shapes, layouts and initial values.

One buffer may hold several logical parameters (fused query, key and value); they follow each other in dim 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from colossus.layout.layout import Box, Layout


class Initializer(Protocol):
    """Draws the values of a box of a tensor from a key, the tensor's full shape and the box alone."""

    def __call__(self, key: int, shape: tuple[int, ...], box: Box) -> np.ndarray[Any, np.dtype[np.float64]]: ...


@dataclass(frozen=True)
class LogicalShard:
    """One logical parameter inside a buffer.

    Attributes:
        part: name of the shard within its module, empty when the buffer has one shard.
        shape: full logical shape.
        layout: how the full shape is sharded.
        init: draws the initial value.
        rows: rows of dim 0 of the local buffer, (start, stop).
    """

    part: str
    shape: tuple[int, ...]
    layout: Layout
    init: Initializer
    rows: tuple[int, int]


class ParameterSpec:
    """Attached to every parameter a layer makes. ``gradient_axes`` is recorded at the first use."""

    def __init__(self, shards: tuple[LogicalShard, ...], description: str) -> None:
        self.shards = shards
        self.description = description
        self.layout = shards[0].layout
        self.name = ""
        self.gradient_axes: tuple[str, ...] | None = None
        #: whether ``gradient_axes`` is known before the first use
        self.is_decided = False

    @property
    def num_elements(self) -> int:
        """Elements of all logical shards, whatever the plan."""
        return sum(math.prod(shard.shape) for shard in self.shards)

    def record(self, axes: tuple[str, ...]) -> None:
        """Note over which axes this use leaves the gradient partial.

        Raises:
            ValueError: when an earlier use left it partial over other axes: no one sum is right for both.
        """
        if self.gradient_axes is None:
            self.gradient_axes = axes
        elif self.gradient_axes != axes and set(self.gradient_axes) != set(axes):
            raise ValueError(
                f"parameter {self.name or self.description} is used under two layouts: its gradient is partial over "
                f"{_words(self.gradient_axes)} at one use and over {_words(axes)} at another. Use it in one region "
                f"only, or give each region its own parameter."
            )


def _words(axes: tuple[str, ...]) -> str:
    return "(" + ", ".join(axes) + ")" if axes else "no axis"


def spec_of(parameter: Tensor) -> ParameterSpec | None:
    """The spec of a parameter made by a layer; None for a plain one, which is in the user layout."""
    return getattr(parameter, "_colossus_spec", None)


def attach(parameter: nn.Parameter, spec: ParameterSpec) -> nn.Parameter:
    parameter._colossus_spec = spec  # type: ignore[attr-defined]
    return parameter


def rows_of(parameter: Tensor) -> list[tuple[int, int]]:
    """Rows of each logical shard in the local buffer of a parameter made by a layer."""
    spec = spec_of(parameter)
    assert spec is not None
    return [shard.rows for shard in spec.shards]


@dataclass(frozen=True)
class Logical:
    """A logical parameter of a module: its name, full shape, layout, and where its local part lives.

    Attributes:
        held_as: name of the parameter that holds it.
    """

    name: str
    held_as: str
    shape: tuple[int, ...]
    layout: Layout
    parameter: nn.Parameter
    rows: tuple[int, int] | None

    def local(self, buffer: Tensor | None = None) -> Tensor:
        """The rank's part of the parameter, or of any tensor of the parameter's buffer shape (its gradient)."""
        held = self.parameter if buffer is None else buffer
        return held if self.rows is None else held[self.rows[0] : self.rows[1]]


def logical_parameters(model: nn.Module, *, keep_ties: bool = False) -> Iterator[Logical]:
    """Every logical parameter of a model by full name, in the order of ``named_parameters``."""
    for name, parameter in model.named_parameters(remove_duplicate=not keep_ties):
        spec = spec_of(parameter)
        if spec is None:
            yield Logical(name, name, tuple(parameter.shape), Layout.whole(parameter.dim()), parameter, None)
            continue
        module, _, leaf = name.rpartition(".")
        for shard in spec.shards:
            path = ".".join(filter(None, (module, shard.part, leaf)))
            rows = shard.rows if len(spec.shards) > 1 else None
            yield Logical(path, name, shard.shape, shard.layout, parameter, rows)


def remember_order(model: nn.Module) -> None:
    """Before a part of a model is dropped: note its parameters and buffers in the order of the whole."""
    vars(model)["_colossus_order"] = _names_in_order(model)


def places(model: nn.Module) -> dict[str, int]:
    """Place of every parameter and buffer in the whole model, by full name; parameters come first."""
    return {name: place for place, name in enumerate(vars(model).get("_colossus_order") or _names_in_order(model))}


def _names_in_order(model: nn.Module) -> tuple[str, ...]:
    return (*(name for name, _ in model.named_parameters()), *(name for name, _ in model.named_buffers()))


def num_parameters(model: nn.Module) -> int:
    """Elements of the whole model, each logical parameter counted once, whatever the plan."""
    return sum(math.prod(logical.shape) for logical in logical_parameters(model))


def local_rows(shapes: list[tuple[int, ...]], layouts: list[Layout], sizes: Mapping[str, int]) -> list[tuple[int, int]]:
    """Rows of each shard in a fused local buffer."""
    rows, start = [], 0
    for shape, layout in zip(shapes, layouts, strict=True):
        stop = start + layout.chunk(shape, sizes)[0]
        rows.append((start, stop))
        start = stop
    return rows
