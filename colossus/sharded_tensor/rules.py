"""The functions of torch that work on each part of a split dim by itself, and where that dim is in what comes out.

A rule is asked once for each split dim of the operands, with a `Call` and `at`, which says where an operand has that
dim: None for a plain tensor, which every rank has whole. It returns the `Place` of the result or raises
`MixesPartsError`. What has no rule, and does not work element by element, is refused.
"""

from __future__ import annotations

from typing import Any

from colossus.layout.operators import Call
from colossus.sharded_tensor import product_rules, reduction_rules, view_rules
from colossus.sharded_tensor.placement import MixesPartsError, Place, avoid, without
from colossus.sharded_tensor.token_collectives import normalize_tokens, require_unpadded
from colossus.sharded_tensor.view_rules import At, Rule, aligned, place_of


def _along(does: str = "works along", default: Any = None, *, is_gone: bool = False) -> Rule:
    """Return the rule of functions along dims of one argument, which are gone after (unless ``keepdim``) or stay."""

    def rule(at: At, call: Call) -> Place:
        x, dims = call.get("self"), call.get("dim", default=default)
        place = avoid(place_of(at, x), x.dim(), dims, does)
        return without(place, x.dim(), dims) if is_gone and not call.get("keepdim") else place

    return rule


def _interleaved(at: At, call: Call) -> Place:
    x, repeats, dim = call.get("self"), call.get("repeats"), call.get("dim")
    place = place_of(at, x)
    if isinstance(repeats, int) and repeats > 0 and dim is not None and dim % x.dim() == place.dim:
        return place._replace(after=1 if at.parts and place.before == 1 else place.after * repeats)
    return avoid(place, x.dim(), dim, "works along")


def _same(at: At, call: Call) -> Place:
    return place_of(at, call.get("self"))


def _joined(at: At, call: Call) -> Place:
    tensors = call.get("tensors")
    split = next(x for x in tensors if at(x) is not None)
    avoid(place_of(at, split), split.dim(), call.get("dim", default=0), "concatenates along")
    return aligned(at, tensors)


def _stacked(at: At, call: Call) -> Place:
    tensors = call.get("tensors")
    place, ndim = aligned(at, tensors), tensors[0].dim()
    dim = place.dim + ndim
    return place.at(dim + 1 if call.get("dim", default=0) % (ndim + 1) <= dim else dim)


def _normalized(at: At, call: Call) -> Place:
    x = call.get("self")
    dims = tuple(range(-len(call.get("normalized_shape")), 0))
    return avoid(place_of(at, x), x.dim(), dims, "normalizes over")


def _rescaled(at: At, call: Call) -> Place:
    x, dim = call.get("self"), call.get("dim", default=1 if call.name == "normalize" else None)
    place = place_of(at, x)
    if at.parts or not isinstance(dim, int) or dim % x.dim() != place.dim or place != Place(place.dim):
        return avoid(place, x.dim(), dim, "works along")
    require_unpadded(place, at.whole(x), at.parallel)
    at.instead = lambda call: normalize_tokens(call, call.get("self"), place, at.parallel)
    return place


def _refused(why: str) -> Rule:
    def rule(at: At, call: Call) -> Place:
        raise MixesPartsError(why)

    return rule


# --- the table

_reduced = reduction_rules.reduced_along
_ROWS: list[tuple[Rule, str]] = [
    (product_rules.linear, "linear"),
    (product_rules.matmul, "matmul mm bmm mv"),
    (product_rules.added_product, "baddbmm addmm"),
    (product_rules.einsum, "einsum"),
    (product_rules.attention, "scaled_dot_product_attention"),
    (view_rules.indexed, "getitem"),
    (view_rules.chosen, "gather scatter scatter_add take_along_dim"),
    (view_rules.index_select, "index_select"),
    (view_rules.looked_up, "embedding"),
    (view_rules.permuted(view_rules.swapped), "transpose t mT mH"),
    (view_rules.permuted(lambda call, ndim: call.get("dim")), "permute"),
    (view_rules.unsqueezed, "unsqueeze"),
    (_same, "one_hot empty_like cpu cuda deepcopy view_as_real"),
    (_joined, "cat"),
    (_stacked, "stack"),
    (lambda at, call: aligned(at, call.get("tensors", "self")), "broadcast_tensors"),
    (reduction_rules.reduced_along, "sum nansum count_nonzero"),
    (reduction_rules.loss_of_classes, "cross_entropy nll_loss"),
    (
        reduction_rules.loss_of_elements,
        "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
        "poisson_nll_loss gaussian_nll_loss soft_margin_loss",
    ),
    (_reduced, "norm linalg_norm linalg_vector_norm logsumexp argmax argmin all any aminmax median"),
    (_reduced, "mean amax amin max min var std var_mean std_mean"),
    (_normalized, "layer_norm rms_norm"),
    (_rescaled, "softmax log_softmax normalize"),
    (_along(), "cumsum cumprod logcumsumexp flip roll"),
    (_along(default=-1), "sort argsort topk glu"),
    (_along(default=0), "chunk split tensor_split narrow"),
    (_interleaved, "repeat_interleave"),
    (view_rules.selected, "select"),
    (_along("selects from", 0, is_gone=True), "unbind"),
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
    words = f"{spoken} {error}. Its input is a rank's part of a tensor ({x!r}), so it would be wrong in silence."
    if not x.placement.is_whole:
        return f"{words} Call colossus.layers.to_whole(x) before it.{_HINTS.get(name, '')}"
    return (
        f"{words} parallel.sequence splits dim 1 of a batch, its tokens; what is computed of all of them is listed in "
        f"docs/sequence-parallelism.md, attention, sums and means among it; colossus.layers.local(x) gives the rank's "
        f"part as a plain tensor, for code that takes care of it itself"
    )


_SPOKEN = {"__getitem__": "indexing", "__setitem__": "assigning by index", "__matmul__": "@", "__rmatmul__": "@"}
_HINTS = {
    "dropout": " colossus.layers.Dropout(p) drops the same under every plan.",
    **dict.fromkeys(
        ("view", "reshape", "unflatten"),
        " Features become the heads of an attention where these divide over the ranks: view(.., heads, head_dim), or "
        "colossus.layers.split_heads(x, heads) and merge_heads.",
    ),
    **dict.fromkeys(
        ("chunk", "split", "glu"),
        " For a gate let one linear give both: colossus.layers.Linear(inputs, dict(gate=n, value=n), split='column') "
        "returns two tensors.",
    ),
    "layer_norm": " colossus.layers.LayerNorm is right on split features.",
}
