"""Which dim of a tensor is split over ranks, and where it is after a function that works on each part by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Where a split dim is. Flattened with others, it is the middle of ``before`` x the dim x ``after``.

    Attributes:
        dim: from the left; negative from the right, in the answer of a rule that need not know the number of dims.
    """

    dim: int
    before: int = 1
    after: int = 1

    def count(self, shape: Sequence[int]) -> int:
        """The elements along the split dim that this rank has."""
        return shape[self.dim] // (self.before * self.after)

    def at(self, dim: int) -> Place:
        return Place(dim, self.before, self.after)


class MixesPartsError(Exception):
    """A function does not work on each part of a split dim by itself, or is not known to: the message says why."""


def as_dims(dims: Any) -> tuple[Any, ...] | None:
    """Dims that were given as one, as several, or not at all: then all are meant."""
    if dims is None or isinstance(dims, bool) or (isinstance(dims, (tuple, list)) and not dims):
        return None
    return tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)


def avoid(place: Place, ndim: int, dims: Any, does: str) -> Place:
    """``place``, which must not be among ``dims`` (None: all)."""
    found = as_dims(dims)
    if found is None:
        raise MixesPartsError(f"{does} all dims at once")
    for dim in found:
        if not isinstance(dim, int):
            raise MixesPartsError(f"{does} {dim!r}, which is not known to leave the split dim alone")
        if dim % ndim == place.dim:
            raise MixesPartsError(f"{does} dim {dim}, which is split")
    return place


def without(place: Place, ndim: int, dims: Any) -> Place:
    """The place once other dims are gone."""
    gone = {dim % ndim for dim in as_dims(dims) or ()}
    return place.at(place.dim - sum(dim < place.dim for dim in gone))


def regrouped(place: Place, source: Sequence[int], target: Sequence[int], inferred: int | None, parts: bool) -> Place:
    """Where a split dim is after a reshape, which keeps the order of the elements.

    Args:
        inferred: the dim whose size was left open (-1), if one was.
        parts: whether ranks hold contiguous parts of the dim, as of features, so that it may be cut into groups, of
            which the outermost is split then (heads of features). Groups of all ranks are not known here, so their
            number must be left open.
    """
    count, after = place.count(source), place.after
    if math.prod(source) != math.prod(target):
        raise MixesPartsError(f"takes shape {tuple(source)}, the rank's part, as {tuple(target)}")
    inner = after * math.prod(source[place.dim + 1 :])
    candidates = []
    stride = 1
    for dim in range(len(target) - 1, -1, -1):
        extent = target[dim] * stride
        if stride and inner and inner % stride == 0 and extent % (inner * count) == 0:
            within = inner // stride
            candidates.append(Place(dim, target[dim] // (count * within), within))
        stride = extent
    is_cut = parts and inferred is not None and place.before == 1
    if is_cut and math.prod(target[:inferred]) == math.prod(source[: place.dim]):
        # features -> [groups, ..]: the groups are split, whose number was left open. A rank's one group may be the
        # whole of its part: then a new dim says that groups are meant
        only_group = len(target) > len(source) > 1 and [each.dim - 1 for each in candidates] == [inferred]
        if only_group or not candidates:
            return Place(inferred)  # type: ignore[arg-type]
    if len(candidates) > 1:  # a rank has one element, which fits anywhere
        ones = [each for each in candidates if target[each.dim] == 1]
        candidates = ones if len(ones) == 1 else [each for each in candidates if each.dim == inferred]
        is_open = len(candidates) != 1
    else:  # a new dim of one beside it, whose size was left open: is it that which grows with the whole?
        beside = [each for each in candidates if inferred is not None and abs(each.dim - inferred) == 1]
        is_open = bool(beside) and target[inferred] == 1 and len(target) > len(source)  # type: ignore[index]
    if is_open or len(candidates) != 1:
        what = "leaves open which dim is split" if is_open else "takes the split dim apart"
        raise MixesPartsError(
            f"{what}: from local shape {tuple(source)}, split in dim {place.dim}, to {tuple(target)}. The split dim "
            f"must stay together in one dim, whose size may be left open (-1)"
        )
    (found,) = candidates
    return Place(found.dim) if parts and found.before == 1 else found
