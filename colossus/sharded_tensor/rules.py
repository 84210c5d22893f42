"""The functions of torch that work on each part of a split dim by itself, and where that dim is in what comes out.

A rule is asked once for each split dim of the operands, with a `Call` and `at`, which says where an operand has that
dim: None for a plain tensor, which every rank has whole. It returns the `Place` of the result or raises
`MixesPartsError`. What has no rule, and does not work element by element, is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from colossus.sharded_tensor.operators import Call
from colossus.sharded_tensor.place import MixesPartsError, Place, as_dims, avoid, regrouped, without


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


def _along(default: Any = None) -> Rule:
    """Of functions along the dims of one argument, which keep all dims."""

    def rule(at: At, call: Call) -> Place:
        x = call.get("self")
        return avoid(found(at, x), x.dim(), call.get("dim", default=default), "works along")

    return rule


def _interleaved(at: At, call: Call) -> Place:
    x, repeats, dim = call.get("self"), call.get("repeats"), call.get("dim")
    place = found(at, x)
    if isinstance(repeats, int) and dim is not None and dim % x.dim() == place.dim:
        return Place(place.dim, place.before, 1 if at.parts and place.before == 1 else place.after * repeats)
    return avoid(place, x.dim(), dim, "works along")


def _reduced(at: At, call: Call, default: Any = None) -> Place:
    x, dims = call.get("self"), call.get("dim", default=default)
    place = avoid(found(at, x), x.dim(), dims, "reduces")
    return place if call.get("keepdim") or as_dims(dims) is None else without(place, x.dim(), dims)


def _removed(default: int) -> Rule:
    """Of functions that take parts along one dim, which is gone then."""

    def rule(at: At, call: Call) -> Place:
        x, dim = call.get("self"), call.get("dim", default=default)
        return without(avoid(found(at, x), x.dim(), dim, "selects from"), x.dim(), dim)

    return rule


def _chosen(at: At, call: Call) -> Place:
    """gather, scatter: along a dim, with indices and values for each element of the others."""
    x = call.get("self")
    avoid(found(at, x), x.dim(), call.get("dim"), "works along")
    return aligned(at, list(call.arguments.values()))


def _index_select(at: At, call: Call) -> Place:
    x, index = call.get("self"), call.get("index")
    if at(x) is None and call.get("dim") == 0:  # rows of a table
        return found(at, index)
    return avoid(found(at, x), x.dim(), call.get("dim"), "selects from")


def _looked_up(at: At, call: Call) -> Place:
    if at(call.get("weight")) is not None:
        raise MixesPartsError("looks up rows of what is split")
    return found(at, call.get("self"))


def _same(at: At, call: Call) -> Place:
    return found(at, call.get("self"))


def _joined(at: At, call: Call) -> Place:
    tensors = call.get("tensors")
    _require_all(at, tensors)
    x = tensors[0]
    avoid(found(at, x), x.dim(), call.get("dim", default=0), "concatenates along")
    return aligned(at, tensors)


def _stacked(at: At, call: Call) -> Place:
    tensors = call.get("tensors")
    _require_all(at, tensors)
    place, ndim = aligned(at, tensors), tensors[0].dim()
    left = place.dim + ndim
    return place.at(left + 1 if call.get("dim", default=0) % (ndim + 1) <= left else left)


def _require_all(at: At, tensors: Sequence[Tensor]) -> None:
    for x in tensors:
        if at(x) is None:
            raise MixesPartsError(
                f"joins what is split and a plain tensor of shape {tuple(x.shape)}, which is whole (a class token, say)"
            )


def _normalized(at: At, call: Call) -> Place:
    x = call.get("self")
    dims = tuple(range(-len(call.get("normalized_shape")), 0))
    return avoid(found(at, x), x.dim(), dims, "normalizes over")


# --- views, permutations, repetitions


def _view(at: At, call: Call) -> Place:
    x, sizes = call.get("self"), call.get("size", "shape", "other")
    if sizes is None or isinstance(sizes, torch.dtype):
        raise MixesPartsError("reads the elements as another dtype")
    sizes = tuple(sizes.shape if isinstance(sizes, Tensor) else sizes)
    inferred = sizes.index(-1) if -1 in sizes else None
    if inferred is not None:
        sizes = tuple(size if size != -1 else x.numel() // (-math.prod(sizes) or 1) for size in sizes)
    return regrouped(found(at, x), x.shape, sizes, inferred, at.parts)


def _unflattened(at: At, call: Call) -> Place:
    x, sizes = call.get("self"), tuple(call.get("sizes"))
    place, dim = found(at, x), call.get("dim") % x.dim()
    if place.dim != dim:
        return place if place.dim < dim else place.at(place.dim + len(sizes) - 1)
    count = x.shape[dim]
    inferred = sizes.index(-1) + 1 if -1 in sizes else None
    known = [size if size != -1 else count // (-math.prod(sizes) or 1) for size in sizes]
    cut = regrouped(place.at(1), (2, count), (2, *known), inferred, at.parts)  # as if behind another dim
    return cut.at(cut.dim - 1 + dim)


def _flattened(at: At, call: Call) -> Place:
    x = call.get("self")
    place, ndim = found(at, x), x.dim()
    start, end = call.get("start_dim", default=0) % ndim, call.get("end_dim", default=-1) % ndim
    if not start <= place.dim <= end:
        return place if place.dim < start else place.at(place.dim - (end - start))
    before = place.before * math.prod(x.shape[start : place.dim])
    after = place.after * math.prod(x.shape[place.dim + 1 : end + 1])
    return Place(start, before, 1 if at.parts and before == 1 else after)


def _permuted(order_of: Callable[[Call, int], Sequence[int]]) -> Rule:
    def rule(at: At, call: Call) -> Place:
        x = call.get("self")
        place = found(at, x)
        return place.at([dim % x.dim() for dim in order_of(call, x.dim())].index(place.dim))

    return rule


def _swapped(call: Call, ndim: int) -> list[int]:
    order = list(range(ndim))
    a, b = call.get("dim0", default=-1), call.get("dim1", default=-2)
    order[a], order[b] = order[b], order[a]
    return order


def _moved(call: Call, ndim: int) -> list[int]:
    sources, targets = ([dim % ndim for dim in as_dims(call.get(n)) or ()] for n in ("source", "destination"))
    order = [-1] * ndim
    for source, target in zip(sources, targets, strict=True):
        order[target] = source
    rest = iter([dim for dim in range(ndim) if dim not in sources])
    return [next(rest) if dim < 0 else dim for dim in order]


def _unsqueezed(at: At, call: Call) -> Place:
    x = call.get("self")
    place = found(at, x)
    return place.at(place.dim + (call.get("dim") % (x.dim() + 1) <= place.dim))


def _squeezed(at: At, call: Call) -> Place:
    x, dim = call.get("self"), call.get("dim")
    place = found(at, x)
    dims = range(x.dim()) if dim is None else [each % x.dim() for each in as_dims(dim) or ()]
    if x.shape[place.dim] == 1 and place.dim in dims:
        raise MixesPartsError("removes the split dim, of which this rank has one (name the other dims)")
    gone = tuple(each for each in dims if x.shape[each] == 1 and each != place.dim)
    return without(place, x.dim(), gone)


def _expanded(at: At, call: Call) -> Place:
    x, sizes = call.get("self"), call.get("size", "repeats", "dims", "dim", "other")
    sizes = tuple(sizes.shape if isinstance(sizes, Tensor) else sizes)
    place = found(at, x)
    right = place.at(place.dim - x.dim())
    kept = (1,) if call.name in ("repeat", "tile") else (-1, x.shape[place.dim])
    if len(sizes) >= -right.dim and sizes[right.dim] not in kept:
        raise MixesPartsError("repeats the split dim")
    return right


def _padded(at: At, call: Call) -> Place:
    x, sizes = call.get("self"), call.get("pad")
    place, dims = found(at, x), len(sizes) // 2
    given = [x.dim() - 1 - number // 2 for number, size in enumerate(sizes) if size]
    if place.dim >= x.dim() - dims and (place.dim in given or call.get("mode", default="constant") != "constant"):
        raise MixesPartsError(f"adds to dim {place.dim}, which is split")
    return place


# --- products


def _matmul(at: At, call: Call) -> Place:
    a, b = call.get("self", "batch1", "mat1"), call.get("other", "mat2", "vec", "batch2")
    at_a, at_b = (None if p is None else p.at(p.dim - x.dim()) for x, p in ((a, at(a)), (b, at(b))))
    if (at_a and at_a.dim == -1) or (at_b and (at_b.dim == -2 or b.dim() == 1)):
        raise MixesPartsError("sums over the split dim")
    if at_a and at_b:
        if at_a != at_b or at_a.dim > -3:
            raise MixesPartsError("multiplies all of the split dim with all of it")
        return at_a
    place = at_a or at_b
    assert place is not None
    if place.dim < -2:
        require_one(b if at_a else a, place.dim)
    if (a.dim() == 1 and place.dim < -1) or b.dim() == 1:  # the vector's dim is gone
        return place.at(place.dim + 1)
    return place


def _added_product(at: At, call: Call) -> Place:
    x = call.get("self")
    a, b = call.get("mat1", "batch1"), call.get("mat2", "batch2")
    if at(a) is None and at(b) is None:
        raise MixesPartsError("adds a plain product to what is split")
    place = _matmul(at, Call("matmul", {"self": a, "other": b}, None))
    if at(x) is None:
        require_one(x, place.dim)
    elif found(at, x).dim - x.dim() != place.dim:
        raise MixesPartsError("adds what is split in different dims")
    return place


def _linear(at: At, call: Call) -> Place:
    x = call.get("self")
    if at(call.get("weight")) is not None or at(call.get("bias")) is not None:
        raise MixesPartsError("takes what is split for a weight")
    return avoid(found(at, x), x.dim(), -1, "sums over")


def _attention(at: At, call: Call) -> Place:
    query, key, value, mask = (call.get(name) for name in ("query", "key", "value", "attn_mask"))
    right = {
        name: (p.dim - x.dim() if (p := at(x)) else None) for name, x in zip("qkv", (query, key, value), strict=True)
    }
    if call.get("dropout_p") and at.parts:
        raise MixesPartsError(
            "with dropout_p would drop the same of the heads of every rank (put colossus.layers.Dropout behind "
            "merge_heads, or take colossus.layers.Attention(dropout=...))"
        )
    if right["q"] is None or right["q"] == -1 or any(right[name] not in (None, right["q"]) for name in "kv"):
        raise MixesPartsError("looks at a part of the queries, keys or values only")
    if right["q"] < -2:  # samples, heads
        if None in right.values():
            raise MixesPartsError("needs query, key and value split alike")
        if mask is not None and at(mask) is None:
            if not at.parts:
                require_one(mask, right["q"])
            elif right["q"] != (-query.dim() if at.role == "batch" else -3):  # see `local_mask`
                raise MixesPartsError("takes a plain mask with queries [batch, heads, tokens, head_dim] only")
    elif right["k"] is not None or call.get("is_causal"):
        raise MixesPartsError("looks at the tokens of one rank only, as queries, keys or values")
    elif mask is not None and at(mask) is None:  # each query looks at what is whole
        require_one(mask, -2)
    place = found(at, query)
    return place.at(right["q"])


def _einsum(at: At, call: Call) -> Place:
    equation, *operands = call.get("args")
    if not isinstance(equation, str):
        raise MixesPartsError("is understood with an equation only: einsum('bth,hk->btk', x, w)")
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        letters = left.replace(",", "").replace("...", "")
        right = "..." * ("..." in left) + "".join(sorted(each for each in set(letters) if letters.count(each) == 1))
    labels = [_labels(term, x.dim()) for term, x in zip(terms, given, strict=True)]
    split = [(each[place.dim], place) for each, x in zip(labels, given, strict=True) if (place := at(x))]
    letter, place = split[0]
    if any((other, where[1:]) != (letter, place[1:]) for other, where in split):
        raise MixesPartsError("multiplies all of the split dim with all of it")
    for each, x in zip(labels, given, strict=True):
        if each.count(letter) > 1:
            raise MixesPartsError("takes a diagonal of the split dim")
        if at(x) is None and letter in each:
            require_one(x, each.index(letter) - len(each))
    dots = max((sum(isinstance(each, int) for each in term) for term in labels), default=0)
    out = _labels(right, len(right.replace("...", "")) + dots * ("..." in right))
    if letter not in out:
        raise MixesPartsError("sums over the split dim")
    return place.at(out.index(letter))


def _labels(term: str, ndim: int) -> list[str | int]:
    """The letters of a term's dims; those of its dots count from the right, from 1 on."""
    before, dots, after = term.partition("...")
    count = ndim - len(before) - len(after) if dots else 0
    return [*before, *range(count, 0, -1), *after]


# --- indices


def _indexed(at: At, call: Call) -> Place:
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


def _assigned(at: At, call: Call) -> Place:
    x, index, value = (call.get(name) for name in ("self", "index", "value"))
    if at(x) is None:
        raise MixesPartsError("writes what is split into a plain tensor, which is whole")
    place = found(at, x)
    if isinstance(index, Tensor) and index.dtype == torch.bool and at(index) == place:
        if isinstance(value, Tensor) and value.dim():
            raise MixesPartsError("writes to what a mask selects (take torch.where(mask, value, x))")
        return place
    region = _indexed(at, call)
    if isinstance(value, Tensor):
        with torch.no_grad():
            ndim = x.detach()[index].dim()
        if at(value) is None:
            require_one(value, region.dim - ndim)
        elif found(at, value).dim - value.dim() != region.dim - ndim:
            raise MixesPartsError("writes what is split in one dim to what is split in another")
    return place


def _refused(does: str) -> Rule:
    def rule(at: At, call: Call) -> Place:
        raise MixesPartsError(does)

    return rule


#: by name of the ATen operator
RULES: dict[str, Rule] = {
    "linear": _linear, **dict.fromkeys(("matmul", "mm", "bmm", "mv"), _matmul), "einsum": _einsum,
    **dict.fromkeys(("addmm", "baddbmm"), _added_product), "scaled_dot_product_attention": _attention,
    "getitem": _indexed, "setitem": _assigned,
    **dict.fromkeys(("view", "view_as"), _view), "flatten": _flattened, "ravel": _flattened, "unflatten": _unflattened,
    **dict.fromkeys(("transpose", "t", "mT", "mH"), _permuted(_swapped)), "movedim": _permuted(_moved),
    "permute": _permuted(lambda call, ndim: call.get("dim")), "unsqueeze": _unsqueezed, "squeeze": _squeezed,
    **dict.fromkeys(("expand", "expand_as", "broadcast_to", "repeat", "tile"), _expanded),
    "cat": _joined, "stack": _stacked, "broadcast_tensors": lambda at, call: aligned(at, call.get("tensors", "self")),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm", "logsumexp", "argmax", "argmin", "all", "any", "var",
                     "std", "var_mean", "std_mean", "median", "aminmax", "count_nonzero"), _reduced),
    **dict.fromkeys(("softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "flip", "roll"), _along()),
    "repeat_interleave": _interleaved, "pad": _padded,
    **dict.fromkeys(("sort", "argsort", "topk", "glu"), _along(-1)), "normalize": _along(1),
    **dict.fromkeys(("chunk", "split", "tensor_split", "narrow"), _along(0)),
    "select": _removed(0), "view_as_complex": _removed(-1), "unbind": _removed(0), "index_select": _index_select,
    **dict.fromkeys(("gather", "scatter", "scatter_add", "take_along_dim"), _chosen),
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalized), "embedding": _looked_up,
    **dict.fromkeys(("one_hot", "empty_like", "cpu", "cuda", "deepcopy", "view_as_real"), _same),
    **dict.fromkeys(("item", "tolist", "numpy", "bool", "float", "int", "index", "array", "contains", "equal",
                     "allclose", "is_nonzero"), _refused("reads the values of one rank, so that ranks may go different "
                                                          "ways")),
}  # fmt: skip

#: random functions: each part draws its own where ranks draw different numbers, which those of a tensor mode do not
RANDOM = {"dropout", "alpha_dropout", "bernoulli", "rand_like", "randn_like", "randint_like", "normal", "uniform",
          "rrelu"}  # fmt: skip
