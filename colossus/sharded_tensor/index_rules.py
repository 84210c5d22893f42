"""Rules of indices; see `colossus.sharded_tensor.rules`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colossus.sharded_tensor.operands import At, aligned, found, require_one
from colossus.sharded_tensor.operators import Call
from colossus.sharded_tensor.place import MixesPartsError, Place, avoid


def indexed(at: At, call: Call) -> Place:
    x, index = call.get("self"), call.get("index")
    if at(x) is None:
        if isinstance(index, Tensor) and not index.dtype.is_floating_point and index.dtype != torch.bool:
            return found(at, index)  # rows of a table
        raise MixesPartsError("indexes a plain tensor, which is whole, by what is split")
    place, parts = found(at, x), index if isinstance(index, tuple) else (index,)
    dim = out = arrays = 0
    answer = None
    for part in _without_ellipsis(parts, x.dim()):
        if part is None:
            out += 1
            continue
        if isinstance(part, bool) or (isinstance(part, Tensor) and (part.dtype == torch.bool or at(part))):
            raise MixesPartsError("selects by a mask or by indices of what is split")
        if dim == place.dim:
            if not isinstance(part, slice) or part.indices(x.shape[dim]) != (0, x.shape[dim], 1):
                raise MixesPartsError(f"selects from dim {dim}, which is split")
            answer = place.at(out)
        dim += 1
        if isinstance(part, slice):
            out += 1
        elif isinstance(part, (Tensor, list, range)):
            out += part.dim() if isinstance(part, Tensor) else torch.as_tensor(part).dim()
            arrays += 1
    if answer is None or arrays > 1:
        raise MixesPartsError("has an index that is not understood (index one dim at a time)")
    return answer


def _without_ellipsis(parts: tuple[Any, ...], ndim: int) -> list[Any]:
    used = sum(part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else part is not None
               for part in parts if part is not Ellipsis)  # fmt: skip
    rest = [slice(None)] * (ndim - used)
    for number, part in enumerate(parts):
        if part is Ellipsis:
            return [*parts[:number], *rest, *parts[number + 1 :]]
    return [*parts, *rest]


def assigned(at: At, call: Call) -> Place:
    x, index, value = (call.get(name) for name in ("self", "index", "value"))
    if at(x) is None:
        raise MixesPartsError("writes what is split into a plain tensor, which is whole")
    place = found(at, x)
    if isinstance(index, Tensor) and index.dtype == torch.bool and at(index) == place:
        if isinstance(value, Tensor) and value.dim():
            raise MixesPartsError("writes to what a mask selects (take torch.where(mask, value, x))")
        return place
    region = indexed(at, call)
    if isinstance(value, Tensor):
        with torch.no_grad():
            ndim = x.detach()[index].dim()
        if at(value) is None:
            require_one(value, region.dim - ndim)
        elif found(at, value).dim - value.dim() != region.dim - ndim:
            raise MixesPartsError("writes what is split in one dim to what is split in another")
    return place


def chosen(at: At, call: Call) -> Place:
    """gather, scatter: along a dim, with indices and values for each element of the others."""
    x = call.get("self")
    avoid(found(at, x), x.dim(), call.get("dim"), "works along")
    return aligned(at, list(call.arguments.values()))


def index_select(at: At, call: Call) -> Place:
    x, index = call.get("self"), call.get("index")
    if at(x) is None and call.get("dim") == 0:  # rows of a table
        return found(at, index)
    return avoid(found(at, x), x.dim(), call.get("dim"), "selects from")


def looked_up(at: At, call: Call) -> Place:
    if at(call.get("weight")) is not None:
        raise MixesPartsError("looks up rows of what is split")
    return found(at, call.get("self"))
