"""The functions of torch that work on each part of a split dim by itself, and where that dim is in what comes out.

A rule is asked once for each split dim of the operands, with a `Call` and `at`, which says where an operand has that
dim: None for a plain tensor, which every rank has whole. It returns the `Place` of the result or raises
`MixesPartsError`. What has no rule, and does not work element by element, is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from colossus.layout.operators import Call
from colossus.sharded_tensor import loss_rules, view_rules
from colossus.sharded_tensor.placement import MixesPartsError, Place, avoid, without
from colossus.sharded_tensor.view_rules import At, Rule, aligned, found, require_one


def _along(does: str = "works along", default: Any = None, *, is_gone: bool = False) -> Rule:
    """Of functions along the dims of one argument, which are gone then, without ``keepdim``, or stay."""

    def rule(at: At, call: Call) -> Place:
        x, dims = call.get("self"), call.get("dim", default=default)
        place = avoid(found(at, x), x.dim(), dims, does)
        return without(place, x.dim(), dims) if is_gone and not call.get("keepdim") else place

    return rule


def _interleaved(at: At, call: Call) -> Place:
    x, repeats, dim = call.get("self"), call.get("repeats"), call.get("dim")
    place = found(at, x)
    if isinstance(repeats, int) and repeats > 0 and dim is not None and dim % x.dim() == place.dim:
        return Place(place.dim, place.before, 1 if at.parts and place.before == 1 else place.after * repeats)
    return avoid(place, x.dim(), dim, "works along")


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


def _refused(why: str) -> Rule:
    def rule(at: At, call: Call) -> Place:
        raise MixesPartsError(why)

    return rule


# --- products and attention


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


# --- the table

_reduced = _along("reduces", is_gone=True)
_ROWS: list[tuple[Rule, str]] = [
    (_linear, "linear"),
    (_matmul, "matmul mm bmm mv"),
    (_einsum, "einsum"),
    (_attention, "scaled_dot_product_attention"),
    (view_rules.indexed, "getitem"),
    (view_rules.chosen, "gather scatter scatter_add take_along_dim"),
    (view_rules.index_select, "index_select"),
    (view_rules.looked_up, "embedding"),
    (view_rules.view, "view view_as"),
    (view_rules.flattened, "flatten ravel"),
    (view_rules.unflattened, "unflatten"),
    (view_rules.permuted(view_rules.swapped), "transpose t mT mH"),
    (view_rules.permuted(lambda call, ndim: call.get("dim")), "permute"),
    (view_rules.unsqueezed, "unsqueeze"),
    (view_rules.squeezed, "squeeze"),
    (view_rules.expanded, "expand expand_as broadcast_to repeat tile"),
    (_same, "one_hot empty_like cpu cuda deepcopy view_as_real"),
    (_joined, "cat"),
    (_stacked, "stack"),
    (lambda at, call: aligned(at, call.get("tensors", "self")), "broadcast_tensors"),
    (loss_rules.summed, "sum nansum count_nonzero"),
    (loss_rules.loss_of_classes, "cross_entropy nll_loss"),
    (
        loss_rules.loss_of_elements,
        "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
        "poisson_nll_loss gaussian_nll_loss soft_margin_loss",
    ),
    (_reduced, "norm linalg_norm linalg_vector_norm logsumexp argmax argmin all any aminmax median"),
    (_reduced, "var std var_mean std_mean"),
    (_normalized, "layer_norm rms_norm"),
    (_along(), "softmax log_softmax cumsum cumprod logcumsumexp flip roll"),
    (_along(default=-1), "sort argsort topk glu"),
    (_along(default=0), "chunk split tensor_split narrow"),
    (_along(default=1), "normalize"),
    (_interleaved, "repeat_interleave"),
    (_along("selects from", 0, is_gone=True), "select unbind"),
    (_along("selects from", -1, is_gone=True), "view_as_complex"),
    (_refused("is not followed: make a new tensor, by torch.where or masked_fill"), "setitem"),
    (
        _refused("reads the values of one rank, so that ranks may go different ways"),
        "item tolist numpy bool float int index array contains equal allclose is_nonzero _is_all_true",
    ),
]
#: by name of the ATen operator; the reductions that torch tags as such need no name
RULES = {name: rule for rule, names in _ROWS for name in names.split()}

#: random functions: each part draws its own where ranks draw different numbers, which those of a tensor mode do not
RANDOM = {
    *("dropout", "alpha_dropout", "rrelu", "bernoulli", "normal", "uniform"),
    *("rand_like", "randn_like", "randint_like"),
}


# --- what is said of what is refused


def refusal(name: str, error: MixesPartsError, x: Any) -> str:
    spoken = _SPOKEN.get(name, name)
    given = f"{spoken} {error}. Its input is a rank's part of a tensor ({x!r}), so it would be wrong in silence."
    if x.placement.is_of_loss:
        return (
            f"{given} parallel.sequence gives a loss function the tokens of one rank. The sum over all elements "
            f"(x.sum(), reduction='sum') and their number, which it returns, are added up over ranks; labels are "
            f"shifted in the data, before they are split; colossus.layers.local(x) gives the rank's part as a plain "
            f"tensor"
        )
    if not x.placement.is_whole:
        return f"{given} Call colossus.layers.to_whole(x) before it.{_HINTS.get(name, '')}"
    return (
        f"{given} parallel.sequence splits dim 1 of a batch, its tokens, which meet in colossus.layers.Attention and "
        f"TransformerBlock; positions are those of colossus.layers.PositionEmbedding and rotary=True; "
        f"colossus.layers.local(x) gives the rank's part as a plain tensor, for code that takes care of it itself"
    )


_SPOKEN = {"__getitem__": "indexing", "__setitem__": "assigning by index", "__matmul__": "@", "__rmatmul__": "@"}
_HINTS = {
    "dropout": " colossus.layers.Dropout(p) drops the same under every plan.",
    **dict.fromkeys(
        ("view", "reshape", "unflatten"),
        " For the heads of an attention leave their number open, view(.., -1, head_dim), or use "
        "colossus.layers.split_heads(x, heads) and merge_heads.",
    ),
    **dict.fromkeys(
        ("chunk", "split", "glu"),
        " For a gate let one linear give both: colossus.layers.Linear(inputs, dict(gate=n, value=n), split='column') "
        "returns two tensors.",
    ),
    "layer_norm": " colossus.layers.LayerNorm is right on split features.",
}
