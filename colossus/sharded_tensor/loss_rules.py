"""Sums over all elements, and torch's loss functions, of what is split: in a loss function a rank's sum is an addend.

The engine adds the sums and counts of all ranks. So a sum over every element of a rank's tokens is right there, as a
plain scalar; a mean, or a sum for each sample, is not.
"""

from __future__ import annotations

from colossus.layout.operators import Call
from colossus.sharded_tensor.placement import MixesPartsError, Place, as_dims, avoid, without
from colossus.sharded_tensor.view_rules import At, aligned, found


def summed(at: At, call: Call) -> Place | None:
    x, dims = call.get("self"), call.get("dim")
    named = as_dims(dims)
    place = found(at, x)
    if at.gives_addends and (named is None or {dim % x.dim() for dim in named} == set(range(x.dim()))):
        return None
    avoid(place, x.dim(), dims, "reduces")
    return place if call.get("keepdim") else without(place, x.dim(), dims)


def loss_of_elements(at: At, call: Call) -> Place | None:
    return _reduced(at, call, aligned(at, list(call.arguments.values())))


def loss_of_classes(at: At, call: Call) -> Place | None:
    """Return the place in a loss of classes in dim 1 (0 of a vector), by labels without it or probabilities with it."""
    x, target = call.get("self"), call.get("target")
    place = at(x)
    if place is None:
        raise MixesPartsError("takes labels that are split with a plain tensor: give it layers.local(labels), too")
    classes = 1 if x.dim() > 1 else 0
    if place.dim == classes:
        raise MixesPartsError("sums over the classes, which are split; colossus.layers.cross_entropy does that")
    if target.dim() < x.dim():
        place = place.at(place.dim - (place.dim > classes))
    if at(target) != place:
        raise MixesPartsError("takes labels that are not split as its input is")
    return _reduced(at, call, place)


def _reduced(at: At, call: Call, place: Place) -> Place | None:
    reduction = call.get("reduction", default="mean")
    if call.get("reduce") is not None or call.get("size_average") is not None:
        raise MixesPartsError("is called with reduce= or size_average=, in the place of reduction=")
    if reduction == "none":
        return place
    if reduction == "sum" and at.gives_addends:
        return None
    raise MixesPartsError(f"reduces all dims at once (reduction={reduction!r})")
