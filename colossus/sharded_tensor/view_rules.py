"""Rules of views, permutations and repetitions; see `colossus.sharded_tensor.rules`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from colossus.sharded_tensor.operands import At, Rule, found
from colossus.sharded_tensor.operators import Call
from colossus.sharded_tensor.place import MixesPartsError, Place, as_dims, regrouped, without


def view(at: At, call: Call) -> Place:
    x, sizes = call.get("self"), call.get("size", "shape", "other")
    if sizes is None or isinstance(sizes, torch.dtype):
        raise MixesPartsError("reads the elements as another dtype")
    sizes = tuple(sizes.shape if isinstance(sizes, Tensor) else sizes)
    inferred = sizes.index(-1) if -1 in sizes else None
    if inferred is not None:
        sizes = tuple(size if size != -1 else x.numel() // (-math.prod(sizes) or 1) for size in sizes)
    return regrouped(found(at, x), x.shape, sizes, inferred, at.parts)


def unflattened(at: At, call: Call) -> Place:
    x, sizes = call.get("self"), tuple(call.get("sizes"))
    place, dim = found(at, x), call.get("dim") % x.dim()
    if place.dim != dim:
        return place if place.dim < dim else place.at(place.dim + len(sizes) - 1)
    count = x.shape[dim]
    inferred = sizes.index(-1) + 1 if -1 in sizes else None
    known = [size if size != -1 else count // (-math.prod(sizes) or 1) for size in sizes]
    cut = regrouped(place.at(1), (2, count), (2, *known), inferred, at.parts)  # as if behind another dim
    return cut.at(cut.dim - 1 + dim)


def flattened(at: At, call: Call) -> Place:
    x = call.get("self")
    place, ndim = found(at, x), x.dim()
    start, end = call.get("start_dim", default=0) % ndim, call.get("end_dim", default=-1) % ndim
    if not start <= place.dim <= end:
        return place if place.dim < start else place.at(place.dim - (end - start))
    before = place.before * math.prod(x.shape[start : place.dim])
    after = place.after * math.prod(x.shape[place.dim + 1 : end + 1])
    return Place(start, before, 1 if at.parts and before == 1 else after)


def permuted(order_of: Callable[[Call, int], Sequence[int]]) -> Rule:
    def rule(at: At, call: Call) -> Place:
        x = call.get("self")
        place = found(at, x)
        return place.at([dim % x.dim() for dim in order_of(call, x.dim())].index(place.dim))

    return rule


def swapped(call: Call, ndim: int) -> list[int]:
    order = list(range(ndim))
    a, b = call.get("dim0", default=-1), call.get("dim1", default=-2)
    order[a], order[b] = order[b], order[a]
    return order


def moved(call: Call, ndim: int) -> list[int]:
    sources, targets = ([dim % ndim for dim in as_dims(call.get(n)) or ()] for n in ("source", "destination"))
    order = [-1] * ndim
    for source, target in zip(sources, targets, strict=True):
        order[target] = source
    rest = iter([dim for dim in range(ndim) if dim not in sources])
    return [next(rest) if dim < 0 else dim for dim in order]


def unsqueezed(at: At, call: Call) -> Place:
    x = call.get("self")
    place = found(at, x)
    return place.at(place.dim + (call.get("dim") % (x.dim() + 1) <= place.dim))


def squeezed(at: At, call: Call) -> Place:
    x, dim = call.get("self"), call.get("dim")
    place = found(at, x)
    dims = range(x.dim()) if dim is None else [each % x.dim() for each in as_dims(dim) or ()]
    if x.shape[place.dim] == 1 and place.dim in dims:
        raise MixesPartsError("removes the split dim, of which this rank has one (name the other dims)")
    gone = tuple(each for each in dims if x.shape[each] == 1 and each != place.dim)
    return without(place, x.dim(), gone)


def expanded(at: At, call: Call) -> Place:
    x, sizes = call.get("self"), call.get("size", "repeats", "dims", "dim", "other")
    sizes = tuple(sizes.shape if isinstance(sizes, Tensor) else sizes)
    place = found(at, x)
    right = place.at(place.dim - x.dim())
    kept = (1,) if call.name in ("repeat", "tile") else (-1, x.shape[place.dim])
    if len(sizes) >= -right.dim and sizes[right.dim] not in kept:
        raise MixesPartsError("repeats the split dim")
    return right


def padded(at: At, call: Call) -> Place:
    x, sizes = call.get("self"), call.get("pad")
    place, dims = found(at, x), len(sizes) // 2
    given = [x.dim() - 1 - number // 2 for number, size in enumerate(sizes) if size]
    if place.dim >= x.dim() - dims and (place.dim in given or call.get("mode", default="constant") != "constant"):
        raise MixesPartsError(f"adds to dim {place.dim}, which is split")
    return place
