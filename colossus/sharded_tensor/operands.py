"""Where the operands of a function have a split dim, and whether they fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from colossus.sharded_tensor.operators import Call
from colossus.sharded_tensor.placement import MixesPartsError, Place


class At:
    """Where operands have the split dim of one role.

    Attributes:
        parts: whether ranks hold contiguous parts of the dim, which may be cut into groups: not of a sequence, whose
            ranks hold tokens in the order of its attention.
    """

    def __init__(self, role: str) -> None:
        self.role, self.parts = role, role != "sequence"

    def __call__(self, x: Any) -> Place | None:
        placement = None if type(x) is Tensor else getattr(x, "placement", None)
        return None if placement is None else placement.place(self.role)


Rule = Callable[[At, Call], Place]


def found(at: At, x: Any) -> Place:
    """Where a tensor has the split dim, which it must have."""
    place = at(x)
    if place is None:
        raise MixesPartsError("is not known to be right when what is split comes as this argument")
    return place


def aligned(at: At, operands: Sequence[Any]) -> Place:
    """The place, from the right, in what operands that meet element by element give."""
    first: tuple[Tensor, Place] | None = None
    for x in operands:
        if isinstance(x, Tensor) and (place := at(x)) is not None:
            right = place.at(place.dim - x.dim())
            if first is None:
                first = x, right
            elif right != first[1] and (x.dim() or first[0].dim()):
                raise MixesPartsError(
                    f"brings what is split in dim {first[1].dim + first[0].dim()} of shape {tuple(first[0].shape)} "
                    f"together with what is split in dim {place.dim} of shape {tuple(x.shape)}"
                )
    assert first is not None
    for x in operands:
        if isinstance(x, Tensor) and at(x) is None:
            require_one(x, first[1].dim)
    return first[1]


def require_one(x: Tensor, dim: int) -> None:
    """That a plain tensor is broadcast over the split dim, which is ``dim`` from the right."""
    if x.dim() >= -dim and x.shape[dim] != 1:
        raise MixesPartsError(
            f"lets dim {x.dim() + dim} of a plain tensor of shape {tuple(x.shape)}, which is whole, meet a dim of "
            f"which a rank has a part (between a column and a row linear what is split alike comes from a "
            f"colossus.layers.Linear(.., split='column'): the second matrix of LoRA, say)"
        )
