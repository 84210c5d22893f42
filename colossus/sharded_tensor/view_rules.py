"""Where the operands of a function have a split dim; rules of views, permutations, repetitions and indices.

See `colossus.sharded_tensor.rules`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from colossus.layout.operators import Call
from colossus.sharded_tensor.placement import MixesPartsError, Place, as_dims, avoid, regrouped, without
from colossus.sharded_tensor.user_backward import runs_user_backward


class At:
    """Where operands have the split dim of one role.

    Attributes:
        parts: whether ranks hold contiguous parts of the dim, which may be cut into groups: not of a sequence, whose
            ranks hold tokens in the order of its attention.
        gives_addends: whether a sum over all of a rank's elements is added up over the ranks: of the tokens in a loss
            function.
    """

    def __init__(self, role: str, *, is_of_loss: bool = False) -> None:
        self.role, self.parts = role, role != "sequence"
        self.gives_addends = is_of_loss and not self.parts

    def __call__(self, x: Any) -> Place | None:
        placement = None if type(x) is Tensor else getattr(x, "placement", None)
        return None if placement is None else placement.place(self.role)


#: None: of what is not split any more, an addend of a loss
Rule = Callable[[At, Call], Place | None]


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
    size = first[0].shape[first[1].dim]
    for x in operands:
        # in the backward of an autograd function, what has the size of a part is one: what it has returned, say
        is_part = isinstance(x, Tensor) and x.dim() >= -first[1].dim and x.shape[first[1].dim] == size
        if isinstance(x, Tensor) and at(x) is None and not (is_part and runs_user_backward()):
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


# --- views and indices


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


def indexed(at: At, call: Call) -> Place:
    x, index = call.get("self"), call.get("index")
    if at(x) is None:
        if isinstance(index, Tensor) and not index.dtype.is_floating_point and index.dtype != torch.bool:
            return found(at, index)  # rows of a table
        raise MixesPartsError("indexes a plain tensor, which is whole, by what is split")
    place, parts = found(at, x), index if isinstance(index, tuple) else (index,)
    if at.gives_addends and isinstance(index, Tensor) and index.dtype == torch.bool and at(index) == place:
        return Place(0)  # some of a rank's tokens
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
