"""Rules of reductions and of torch's losses: along the tokens of all sequence ranks, else along whole dims only."""

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
from colossus.sharded_tensor.view_rules import SplitRole, aligned, place_of


def reduced_along(role: SplitRole, call: Call) -> Place | None:
    """Return the place after a reduction along ``dim``."""
    x, dims = call.get("self"), call.get("dim")
    place, shape = place_of(role, x), shape_of(x)
    if call.get("others") is not None:
        raise MixesPartsError("has arguments that are not understood: name them (dim=)")
    named = as_dims(dims)
    along = tuple(range(x.dim())) if named is None else tuple(dim % x.dim() for dim in named if isinstance(dim, int))
    if role.is_contiguous or place.dim not in along:
        place = avoid(place, x.dim(), dims, "reduces")
        return place if call.get("keepdim") else without(place, x.dim(), dims)
    if call.name not in ("sum", "count_nonzero"):  # of padding losses and masks are zero
        require_unpadded(place, role.whole(x), role.parallel)
    whole = math.prod(shape[dim] for dim in along)
    role.instead = lambda call: reduce_tokens(call, call.get("self"), place, whole, role.parallel)
    return None


def loss_of_elements(role: SplitRole, call: Call) -> Place | None:
    """Return the place in a loss of each element."""
    return _reduced(role, call, aligned(role, list(call.arguments.values())), math.prod(shape_of(call.get("self"))))


def loss_of_classes(role: SplitRole, call: Call) -> Place | None:
    """Return the place in a loss of classes in dim 1 (0 of a vector), by labels without it or probabilities with it."""
    x, target = call.get("self"), call.get("target")
    place = role.place(x)
    if place is None:
        raise MixesPartsError("takes labels that are split with a plain tensor: give it layers.local(labels), too")
    classes = 1 if x.dim() > 1 else 0
    if place.dim == classes:
        raise MixesPartsError("sums over the classes, which are split; colossus.layers.cross_entropy does that")
    if target.dim() < x.dim():
        place = place.at(place.dim - (place.dim > classes))
    role.join(target, place.at(place.dim - target.dim()), role.whole(x))
    sizes = list(shape_of(x))
    return _reduced(role, call, place, math.prod(sizes) // sizes[classes])


def _reduced(role: SplitRole, call: Call, place: Place, whole: int) -> Place | None:
    reduction = call.get("reduction", default="mean")
    if call.overload is not None:
        raise MixesPartsError(f"is an operator here: call torch.nn.functional.{call.name}")
    if call.get("reduce") is not None or call.get("size_average") is not None:
        raise MixesPartsError("is called with reduce= or size_average=, in the place of reduction=")
    if reduction == "none":
        return place
    if role.is_contiguous:
        raise MixesPartsError(f"reduces all dims at once (reduction={reduction!r})")
    function: Callable[..., Tensor] = getattr(F, call.name)

    def over_tokens(call: Call) -> Tensor:
        options: dict[str, Any] = {"input" if key == "self" else key: value for key, value in call.arguments.items()}
        return reduce_loss(call, lambda **more: function(**(options | more)), role.parallel, whole)

    role.instead = over_tokens
    return None
