"""Reductions and torch's loss functions of what is split: along tokens of all ranks, else along whole dims alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from colossus.layout.operators import Call
from colossus.sharded_tensor.placement import MixesPartsError, Place, as_dims, avoid, without
from colossus.sharded_tensor.sizes import shape_of
from colossus.sharded_tensor.token_collectives import reduce_loss, reduce_tokens, require_unpadded
from colossus.sharded_tensor.view_rules import At, aligned, place_of


def reduced_along(at: At, call: Call) -> Place | None:
    """Return the place after a reduction along ``dim``."""
    x, dims = call.get("self"), call.get("dim")
    place, shape = place_of(at, x), shape_of(x)
    if call.get("others") is not None:
        raise MixesPartsError("has arguments that are not understood: name them (dim=)")
    named = as_dims(dims)
    along = tuple(range(x.dim())) if named is None else tuple(dim % x.dim() for dim in named if isinstance(dim, int))
    if at.parts or place.dim not in along:
        place = avoid(place, x.dim(), dims, "reduces")
        return place if call.get("keepdim") else without(place, x.dim(), dims)
    if call.name not in ("sum", "count_nonzero"):  # of padding losses and masks are zero
        require_unpadded(place, at.whole(x), at.parallel)
    whole = math.prod(shape[dim] for dim in along)
    at.instead = lambda call: reduce_tokens(call, call.get("self"), place, whole, at.parallel)
    return None


def loss_of_elements(at: At, call: Call) -> Place | None:
    """Return the place in a loss of each element."""
    return _reduced(at, call, aligned(at, list(call.arguments.values())), math.prod(shape_of(call.get("self"))))


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
    at.join(target, place.at(place.dim - target.dim()), at.whole(x))
    sizes = list(shape_of(x))
    return _reduced(at, call, place, math.prod(sizes) // sizes[classes])


def _reduced(at: At, call: Call, place: Place, whole: int) -> Place | None:
    reduction = call.get("reduction", default="mean")
    if call.overload is not None:
        raise MixesPartsError(f"is an operator here: call torch.nn.functional.{call.name}")
    if call.get("reduce") is not None or call.get("size_average") is not None:
        raise MixesPartsError("is called with reduce= or size_average=, in the place of reduction=")
    if reduction == "none":
        return place
    if at.parts:
        raise MixesPartsError(f"reduces all dims at once (reduction={reduction!r})")
    function: Callable[..., Tensor] = getattr(F, call.name)

    def over_tokens(call: Call) -> Tensor:
        options: dict[str, Any] = {"input" if key == "self" else key: value for key, value in call.arguments.items()}
        return reduce_loss(call, lambda **more: function(**(options | more)), at.parallel, whole)

    at.instead = over_tokens
    return None
