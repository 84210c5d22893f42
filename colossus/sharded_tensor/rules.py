"""The functions of torch that work on each part of a split dim by itself, and where that dim is in what comes out.

A rule is asked once for each split dim of the operands, with a `Call` and `at`, which says where an operand has that
dim: None for a plain tensor, which every rank has whole. It returns the `Place` of the result or raises
`MixesPartsError`. What has no rule, and does not work element by element, is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from colossus.sharded_tensor import product_rules, view_rules
from colossus.sharded_tensor.operands import At, Rule, aligned, found
from colossus.sharded_tensor.operators import Call
from colossus.sharded_tensor.placement import MixesPartsError, Place, as_dims, avoid, without


def _along(default: Any = None) -> Rule:
    """Of functions along the dims of one argument, which keep all dims."""

    def rule(at: At, call: Call) -> Place:
        x = call.get("self")
        return avoid(found(at, x), x.dim(), call.get("dim", default=default), "works along")

    return rule


def _interleaved(at: At, call: Call) -> Place:
    x, repeats, dim = call.get("self"), call.get("repeats"), call.get("dim")
    place = found(at, x)
    if isinstance(repeats, int) and repeats > 0 and dim is not None and dim % x.dim() == place.dim:
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


def _reads_values(at: At, call: Call) -> Place:
    raise MixesPartsError("reads the values of one rank, so that ranks may go different ways")


_ROWS: list[tuple[Rule, str]] = [
    (product_rules.linear, "linear"),
    (product_rules.matmul, "matmul mm bmm mv"),
    (product_rules.added_product, "addmm baddbmm"),
    (product_rules.einsum, "einsum"),
    (product_rules.attention, "scaled_dot_product_attention"),
    (view_rules.indexed, "getitem"),
    (view_rules.assigned, "setitem"),
    (view_rules.chosen, "gather scatter scatter_add take_along_dim"),
    (view_rules.index_select, "index_select"),
    (view_rules.looked_up, "embedding"),
    (view_rules.view, "view view_as"),
    (view_rules.flattened, "flatten ravel"),
    (view_rules.unflattened, "unflatten"),
    (view_rules.permuted(view_rules.swapped), "transpose t mT mH"),
    (view_rules.permuted(view_rules.moved), "movedim"),
    (view_rules.permuted(lambda call, ndim: call.get("dim")), "permute"),
    (view_rules.unsqueezed, "unsqueeze"),
    (view_rules.squeezed, "squeeze"),
    (view_rules.expanded, "expand expand_as broadcast_to repeat tile"),
    (view_rules.padded, "pad"),
    (_same, "one_hot empty_like cpu cuda deepcopy view_as_real"),
    (_joined, "cat"),
    (_stacked, "stack"),
    (lambda at, call: aligned(at, call.get("tensors", "self")), "broadcast_tensors"),
    (_reduced, "norm linalg_norm linalg_vector_norm logsumexp argmax argmin all any count_nonzero aminmax median"),
    (_reduced, "var std var_mean std_mean"),
    (_normalized, "layer_norm rms_norm"),
    (_along(), "softmax log_softmax cumsum cumprod logcumsumexp flip roll"),
    (_along(-1), "sort argsort topk glu"),
    (_along(0), "chunk split tensor_split narrow"),
    (_along(1), "normalize"),
    (_interleaved, "repeat_interleave"),
    (_removed(0), "select unbind"),
    (_removed(-1), "view_as_complex"),
    (_reads_values, "item tolist numpy bool float int index array contains equal allclose is_nonzero _is_all_true"),
]
#: by name of the ATen operator; the reductions that torch tags as such need no name
RULES = {name: rule for rule, names in _ROWS for name in names.split()}

#: random functions: each part draws its own where ranks draw different numbers, which those of a tensor mode do not
RANDOM = {
    *("dropout", "alpha_dropout", "rrelu", "bernoulli", "normal", "uniform"),
    *("rand_like", "randn_like", "randint_like"),
}
