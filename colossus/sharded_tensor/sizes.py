"""Functions with sizes as arguments (views, expand, repeat), which are those of the whole tensor, on a rank's part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from colossus.layout.operators import Call
from colossus.sharded_tensor.placement import MixesPartsError, Place, Placement, Segment, as_dims, placement_of


def resized(call: Call, x: Tensor, placement: Placement) -> tuple[Tensor, Placement]:
    """Return this rank's part of the result of one of `RESIZES`, and how it is split.

    Args:
        x: the plain local tensor.

    Raises:
        MixesPartsError: where a split dim neither stays together in one dim nor is cut into groups that ranks share,
            and where it is repeated.
    """
    segments = placement.segments(x.shape)
    out, moved = RESIZES[call.name](call, x, segments, placement.whole_shape(x.shape))
    places = {role: place for segment, place in zip(segments, moved, strict=True) for role in segment.roles}
    return out, replace(placement, places=tuple((role, places[role]) for role, _ in placement.places), standard_ndim=0)


Resized = tuple[Tensor, list[Place]]

# --- reshapes, which keep the order of the elements


def _reshaped(call: Call, x: Tensor, segments: list[Segment], whole: torch.Size) -> Resized:
    sizes = _sizes(call, whole)
    if math.prod(sizes) != math.prod(whole):
        raise MixesPartsError(f"takes shape {tuple(whole)} as {tuple(sizes)}, which has another number of elements")
    targets = [_target(segment, _inner(segment, segments, whole), whole, sizes) for segment in segments]
    local = list(sizes)
    for _, place, count, of_all in targets:
        local[place.dim] = local[place.dim] // of_all * count if of_all else 0
    return x.reshape(local), [_scaled(target, targets, to_local=True) for target in targets]


def _sizes(call: Call, whole: Sequence[int]) -> list[int]:
    """Return the sizes of the result, with a number in place of -1."""
    dims = len(whole)
    if call.name in ("flatten", "ravel"):
        start, end = (call.get(name, default=dim) % dims for name, dim in (("start_dim", 0), ("end_dim", -1)))
        return [*whole[:start], math.prod(whole[start : end + 1]), *whole[end + 1 :]]
    sizes = call.get("sizes", "size", "shape", "other")
    if sizes is None or isinstance(sizes, torch.dtype):
        raise MixesPartsError("reads the elements as another dtype")
    sizes = list(shape_of(sizes) if isinstance(sizes, Tensor) else sizes)
    if call.name == "unflatten":
        dim = call.get("dim") % dims
        return [*whole[:dim], *_closed(sizes, whole[dim]), *whole[dim + 1 :]]
    return _closed(sizes, math.prod(whole))


def _closed(sizes: list[int], count: int) -> list[int]:
    rest = -math.prod(sizes) if -1 in sizes else 0
    return [size if size != -1 else count // (rest or 1) for size in sizes]


def _inner(segment: Segment, segments: list[Segment], whole: Sequence[int]) -> int:
    """Return how many elements of the whole tensor lie between two neighbours along a split dim."""
    return _scaled(segment, segments, to_local=False).after * math.prod(whole[segment.place.dim + 1 :])


def _target(segment: Segment, inner: int, whole: Sequence[int], sizes: Sequence[int]) -> Segment:
    """Return where a split dim is in the result, with ``before`` and ``after`` of the whole tensor."""
    count, stride = segment.whole, 1
    for dim in range(len(sizes) - 1, -1, -1):
        extent = sizes[dim] * stride
        if inner and stride and count * inner and extent % (inner * count) == 0:
            before = extent // (inner * count)
            if inner % stride == 0:
                after = inner // stride
                if before == 1 and "sequence" not in segment.roles:  # the parts of ranks follow one another
                    return Segment(segment.roles, Place(dim), segment.local * after, count * after)
                return segment._replace(place=segment.place._replace(dim=dim, before=before, after=after))
            groups = inner * count // stride
            is_shared = inner * count % stride == 0 and stride % inner == 0 and groups * segment.local % count == 0
            if is_shared and "sequence" not in segment.roles:
                return Segment(segment.roles, Place(dim, before), groups * segment.local // count, groups)
        stride = extent
    raise MixesPartsError(
        f"takes the split dim apart: from shape {tuple(whole)}, split in dim {segment.place.dim}, to {tuple(sizes)}. "
        f"It must stay together in one dim, or be cut into groups, as features into heads, which divide over "
        f"the {count // segment.local if segment.local else 0} ranks that split it"
    )


def _scaled(segment: Segment, segments: list[Segment], *, to_local: bool) -> Place:
    """Return a place with ``before`` and ``after`` counted on this rank (``to_local``) or in the whole tensor.

    They differ where other split dims are flattened with it.
    """
    place = segment.place
    before, after = place.before, place.after
    for other in segments:
        if other.place.dim != place.dim or other is segment:
            continue
        size, scaled = (other.whole, other.local) if to_local else (other.local, other.whole)
        if other.place.after < place.after:
            after = after // size * scaled
        else:
            before = before // size * scaled
    return place._replace(before=before, after=after)


# --- repetitions


def _expanded(call: Call, x: Tensor, segments: list[Segment], whole: torch.Size) -> Resized:
    sizes = call.get("size", "repeats", "dims", "dim", "other")
    sizes = list(shape_of(sizes) if isinstance(sizes, Tensor) else as_dims(sizes) or ())
    repeats = call.name in ("repeat", "tile")
    if call.name == "tile":
        sizes = [1] * (x.dim() - len(sizes)) + sizes
    more = len(sizes) - x.dim()
    for segment in segments:
        dim = segment.place.dim + more
        if sizes[dim] not in ((1,) if repeats else (-1, whole[segment.place.dim])):
            raise MixesPartsError("repeats the split dim")
        sizes[dim] = 1 if repeats else -1
    out = x.repeat(sizes) if repeats else x.expand(sizes)
    return out, [segment.place.at(segment.place.dim + more) for segment in segments]


# --- dims of one


def _squeezed(call: Call, x: Tensor, segments: list[Segment], whole: torch.Size) -> Resized:
    dims = as_dims(call.get("dim"))
    named = range(x.dim()) if dims is None else [dim % x.dim() for dim in dims]
    split = {segment.place.dim for segment in segments}
    gone = [dim for dim in named if whole[dim] == 1 and dim not in split]
    places = [
        segment.place.at(segment.place.dim - sum(dim < segment.place.dim for dim in gone)) for segment in segments
    ]
    return x.squeeze(tuple(gone)), places


def shape_of(x: Tensor) -> Sequence[int]:
    """Return the shape of a tensor; of a split one that of the whole."""
    placement = placement_of(x)
    return x.shape if placement is None else placement.whole_shape(x.shape)


RESIZES: dict[str, Callable[[Call, Tensor, list[Segment], torch.Size], Resized]] = {
    **dict.fromkeys(("view", "view_as", "flatten", "ravel", "unflatten"), _reshaped),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to", "repeat", "tile"), _expanded),
    "squeeze": _squeezed,
}
