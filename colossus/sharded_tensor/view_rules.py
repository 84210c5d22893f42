"""The split dim of a function's operands (`At`), and the rules of permutations and indices.

See `colossus.sharded_tensor.rules`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from colossus.layout.operators import Call
from colossus.sharded_tensor.placement import MixesPartsError, Place, Placement, Segment, avoid, placement_of, without
from colossus.sharded_tensor.sizes import shape_of
from colossus.sharded_tensor.token_collectives import (
    CHOSEN,
    all_ranks_have_some,
    broadcast_token,
    require_unpadded,
    select_window,
    sum_over_ranks,
)
from colossus.sharded_tensor.user_backward import runs_user_backward


class SplitRole:
    """One role (batch, sequence, tokens, features) that splits operands of a call, and the requests of its rule.

    Attributes:
        name: the role.
        is_contiguous: whether ranks hold contiguous parts of the dim, which may be cut into groups. Ranks of a sequence
            hold tokens in the order of its attention.
        placement: the axes of the operands.
        parallel: the model's context and regions.
        sliced: operands that have all of a split dim: each with that dim, from the right, and its place.
        gathered: operands that the function gets with the tokens of all ranks.
        instead: the function to call with local operands in place of the called one; None: the called one.
    """

    def __init__(self, name: str, placement: Placement) -> None:
        self.name, self.is_contiguous = name, name != "sequence"
        self.placement, self.parallel = placement, placement.parallel
        self.sliced: list[tuple[Tensor, int, Place]] = []
        self.gathered: list[Tensor] = []
        self.instead: Callable[[Call], Tensor] | None = None

    def place(self, x: Any) -> Place | None:
        """Return where an operand has the split dim; None for a plain one, and where this role does not split it."""
        placement = placement_of(x)
        return None if placement is None else placement.place(self.name)

    def whole(self, x: Tensor) -> int:
        """Return the elements of all ranks along the split dim of an operand."""
        segments: list[Segment] = x.placement.segments(x.shape)  # type: ignore[attr-defined]
        return next(segment.whole for segment in segments if self.name in segment.roles)

    def slice_plain(self, x: Tensor, right: int, place: Place, whole: int) -> None:
        """Record that ranks take their part of a plain operand, unless its dim is broadcast.

        Args:
            right: the dim, from the right.
            place: the place of the split dim in the other operand.
            whole: the elements along the split dim on all ranks together.
        """
        if x.dim() < -right or x.shape[right] == 1:
            return
        is_flat = place.before != 1 or place.after != 1
        size = whole * place.before * place.after
        if self.name == "batch":
            whole_axes, axes = self.placement.axes("batch")
            if axes[: len(whole_axes)] != whole_axes:
                raise MixesPartsError(
                    f"combines a plain tensor of shape {tuple(x.shape)} with samples that ranks have exchanged: it has "
                    f"those of this rank, and not all ranks need to have one"
                )
        if x.shape[right] == size and not (is_flat and self.is_contiguous):
            self.sliced.append((x, right, place))
        elif not runs_user_backward():  # in a user's backward a tensor of the size of a part is a part
            raise MixesPartsError(
                f"combines dim {x.dim() + right} of a plain tensor of shape {tuple(x.shape)} with a dim of {size} that "
                f"is split: it must have all {size}, the same on all ranks, or one"
            )

    def join(self, x: Tensor, right: Place, whole: int) -> None:
        """Check that an operand is split at ``right``, from the right, too, or take the part of a plain one.

        Raises:
            MixesPartsError: the operand is split in another way. Tokens are gathered and sliced anew instead.
        """
        place = self.place(x)
        if place is None:
            self.slice_plain(x, right.dim, right, whole)
            return
        place = place.at(place.dim - x.dim())
        if place == right or not x.dim():
            return
        size = shape_of(x)[right.dim] if x.dim() >= -right.dim else 1
        if self.is_contiguous or size not in (1, whole * right.before * right.after):
            raise MixesPartsError(
                f"combines a tensor that is split in a dim of {whole} with one that is split in dim "
                f"{place.dim + x.dim()} of shape {tuple(shape_of(x))}"
            )
        self.gathered.append(x)
        if size != 1:
            self.sliced.append((x, right.dim, right))

    def gather(self, x: Tensor) -> None:
        """Request the tokens of all ranks for an operand."""
        place = self.place(x)
        assert place is not None
        require_unpadded(place, self.whole(x), self.parallel)
        self.gathered.append(x)


#: a function that returns the place of the role in the result; None if the result is not split by it
Rule = Callable[[SplitRole, Call], Place | None]


def place_of(role: SplitRole, x: Any) -> Place:
    """Return where a tensor has the split dim, which it must have."""
    place = role.place(x)
    if place is None:
        raise MixesPartsError("is not known to be right with a split tensor as this argument")
    return place


def aligned(role: SplitRole, operands: Sequence[Any]) -> Place:
    """Return the place, from the right, in the result of an element-wise function of these operands."""
    tensors = [x for x in operands if isinstance(x, Tensor)]
    split = [x for x in tensors if role.place(x) is not None]
    first = max(split, key=lambda x: math.prod(shape_of(x)))  # the same operand on all ranks, whatever their parts
    right = place_of(role, first).at(place_of(role, first).dim - first.dim())
    whole = role.whole(first)
    for x in tensors:
        role.join(x, right, whole)
    return right


# --- permutations and indices


def permuted(order_of: Callable[[Call, int], Sequence[int]]) -> Rule:
    def rule(role: SplitRole, call: Call) -> Place:
        x = call.get("self")
        place = place_of(role, x)
        return place.at([dim % x.dim() for dim in order_of(call, x.dim())].index(place.dim))

    return rule


def swapped(call: Call, ndim: int) -> list[int]:
    order = list(range(ndim))
    a, b = call.get("dim0", default=-1), call.get("dim1", default=-2)
    order[a], order[b] = order[b], order[a]
    return order


def unsqueezed(role: SplitRole, call: Call) -> Place:
    x = call.get("self")
    place = place_of(role, x)
    return place.at(place.dim + (call.get("dim") % (x.dim() + 1) <= place.dim))


def indexed(role: SplitRole, call: Call) -> Place | None:
    x, index = call.get("self"), call.get("index")
    if role.place(x) is None:
        if isinstance(index, Tensor) and not index.dtype.is_floating_point and index.dtype != torch.bool:
            return place_of(role, index)  # rows of a table
        raise MixesPartsError("indexes a plain tensor, which is whole, by a split one")
    place, parts = place_of(role, x), index if isinstance(index, tuple) else (index,)
    if (
        not role.is_contiguous
        and isinstance(index, Tensor)
        and index.dtype == torch.bool
        and role.place(index) == place
    ):
        return _chosen_by(role, index)
    parts = tuple(_without_ellipsis(parts, x.dim()))
    dim = out = arrays = 0
    answer = None
    for number, part in enumerate(parts):
        if part is None:
            out += 1
            continue
        if isinstance(part, bool) or (isinstance(part, Tensor) and (part.dtype == torch.bool or role.place(part))):
            raise MixesPartsError("selects by a mask or by indices that are split")
        if dim == place.dim:
            size = shape_of(x)[dim]
            if not isinstance(part, slice) or part.indices(size) != (0, size, 1):
                if role.is_contiguous:
                    raise MixesPartsError(f"selects from dim {dim}, which is split")
                return _of_tokens(role, x, parts, number, place.at(out))
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


def selected(role: SplitRole, call: Call) -> Place | None:
    x, dim, number = call.get("self"), call.get("dim") % call.get("self").dim(), call.get("index")
    place = place_of(role, x)
    if place.dim == dim and not role.is_contiguous and isinstance(number, int):
        index = (*[slice(None)] * dim, number, *[slice(None)] * (x.dim() - dim - 1))
        return _of_tokens(role, x, index, dim, place)
    return without(avoid(place, x.dim(), dim, "selects from"), x.dim(), dim)


def _of_tokens(role: SplitRole, x: Tensor, index: tuple[Any, ...], number: int, out: Place) -> Place | None:
    """Return the place after an index whose entry ``number`` takes some of the tokens of a sequence."""
    place, part, total, parallel = place_of(role, x), index[number], role.whole(x), role.parallel
    placement = x.placement  # type: ignore[attr-defined]
    if any(other.dim == place.dim for name, other in placement.places if name != role.name):
        raise MixesPartsError("takes some tokens, which tensor ranks split, too")
    is_slice = isinstance(part, slice) and part.step in (None, 1)
    if place != Place(place.dim) or not (is_slice or isinstance(part, int)):
        role.gather(x)
        return None
    if isinstance(part, int) and not -total <= part < total:
        raise IndexError(f"index {part} is out of bounds for {total} tokens")
    start, stop = (part % total, part % total + 1) if isinstance(part, int) else part.indices(total)[:2]
    if stop - start == 1:
        if stop == total:
            require_unpadded(place, total, parallel)
        chosen = (*index[:number], 0 if isinstance(part, int) else slice(None), *index[number + 1 :])
        role.instead = lambda call: broadcast_token(call.get("self"), place.dim, start, total, parallel)[chosen]
        return None
    window = (start, max(start, stop), total)
    if not all_ranks_have_some(window, parallel):
        role.gather(x)
        return None
    rest = (*index[:number], slice(None), *index[number + 1 :])
    role.instead = lambda call: select_window(call.get("self"), place.dim, window, parallel)[rest]
    return out._replace(window=window)


def _chosen_by(role: SplitRole, mask: Tensor) -> Place:
    """Return the place of the tokens that a mask selects: any number on each rank."""
    count = mask.as_subclass(Tensor).sum()
    return Place(0, window=(0, int(sum_over_ranks(count, role.parallel)), CHOSEN))


def _without_ellipsis(parts: tuple[Any, ...], ndim: int) -> list[Any]:
    used = sum(part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else part is not None
               for part in parts if part is not Ellipsis)  # fmt: skip
    rest = [slice(None)] * (ndim - used)
    for number, part in enumerate(parts):
        if part is Ellipsis:
            return [*parts[:number], *rest, *parts[number + 1 :]]
    return [*parts, *rest]


def chosen(role: SplitRole, call: Call) -> Place:
    """Return the place in gather and scatter, which have an index for each element of the other dims."""
    x = call.get("self")
    avoid(place_of(role, x), x.dim(), call.get("dim"), "works along")
    return aligned(role, list(call.arguments.values()))


def index_select(role: SplitRole, call: Call) -> Place | None:
    x, index = call.get("self"), call.get("index")
    if role.place(x) is None and call.get("dim") == 0:  # rows of a table
        return place_of(role, index)
    return avoid(place_of(role, x), x.dim(), call.get("dim"), "selects from")


def looked_up(role: SplitRole, call: Call) -> Place:
    if role.place(call.get("weight")) is not None:
        raise MixesPartsError("looks up rows of a split table")
    return place_of(role, call.get("self"))
