"""The functions of torch that work on each part of a split dim by itself: the place of that dim in the result.

A rule is called once for each role that splits operands, with a `SplitRole` and a `Call`. ``role.place(x)`` is where an
operand has the dim: None for a plain tensor, which every rank has whole. The rule returns the `Place` of the result or
raises `MixesPartsError`. Functions without a rule are refused, unless they work element by element.
"""

from __future__ import annotations

from typing import Any

from colossus.layout.operators import Call
from colossus.sharded_tensor import product_rules, reduction_rules, view_rules
from colossus.sharded_tensor.placement import MixesPartsError, Place, avoid, without
from colossus.sharded_tensor.token_collectives import normalize_tokens, require_unpadded
from colossus.sharded_tensor.view_rules import Rule, SplitRole, aligned, place_of


def _along(does: str = "works along", default: Any = None, *, is_gone: bool = False) -> Rule:
    """Return the rule of functions along dims of one argument; ``is_gone``: the dims go, unless ``keepdim`` is set."""

    def rule(role: SplitRole, call: Call) -> Place:
        x, dims = call.get("self"), call.get("dim", default=default)
        place = avoid(place_of(role, x), x.dim(), dims, does)
        return without(place, x.dim(), dims) if is_gone and not call.get("keepdim") else place

    return rule


def _interleaved(role: SplitRole, call: Call) -> Place:
    x, repeats, dim = call.get("self"), call.get("repeats"), call.get("dim")
    place = place_of(role, x)
    if isinstance(repeats, int) and repeats > 0 and dim is not None and dim % x.dim() == place.dim:
        return place._replace(after=1 if role.is_contiguous and place.before == 1 else place.after * repeats)
    return avoid(place, x.dim(), dim, "works along")


def _same(role: SplitRole, call: Call) -> Place:
    return place_of(role, call.get("self"))


def _joined(role: SplitRole, call: Call) -> Place:
    tensors = call.get("tensors")
    split = next(x for x in tensors if role.place(x) is not None)
    avoid(place_of(role, split), split.dim(), call.get("dim", default=0), "concatenates along")
    return aligned(role, tensors)


def _stacked(role: SplitRole, call: Call) -> Place:
    tensors = call.get("tensors")
    place, ndim = aligned(role, tensors), tensors[0].dim()
    dim = place.dim + ndim
    return place.at(dim + 1 if call.get("dim", default=0) % (ndim + 1) <= dim else dim)


def _normalized(role: SplitRole, call: Call) -> Place:
    x = call.get("self")
    dims = tuple(range(-len(call.get("normalized_shape")), 0))
    return avoid(place_of(role, x), x.dim(), dims, "normalizes over")


def _rescaled(role: SplitRole, call: Call) -> Place:
    x, dim = call.get("self"), call.get("dim", default=1 if call.name == "normalize" else None)
    place = place_of(role, x)
    if role.is_contiguous or not isinstance(dim, int) or dim % x.dim() != place.dim or place != Place(place.dim):
        return avoid(place, x.dim(), dim, "works along")
    require_unpadded(place, role.whole(x), role.parallel)
    role.instead = lambda call: normalize_tokens(call, call.get("self"), place, role.parallel)
    return place


def _refused(why: str) -> Rule:
    def rule(role: SplitRole, call: Call) -> Place:
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
    (lambda role, call: aligned(role, call.get("tensors", "self")), "broadcast_tensors"),
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

#: random functions; they are refused for parts over tensor ranks, which draw the same numbers
RANDOM = {
    *("dropout", "alpha_dropout", "rrelu", "bernoulli", "normal", "uniform"),
    *("rand_like", "randn_like", "randint_like"),
}


# --- the message of a refusal


def refusal(name: str, error: MixesPartsError, x: Any) -> str:
    spoken = _SPOKEN.get(name, name)
    words = f"{spoken} {error}. Its input is a rank's part of a tensor ({x!r}), so it would be wrong in silence."
    if not x.placement.is_whole:
        return f"{words} Call colossus.layers.to_whole(x) before it.{_HINTS.get(name, '')}"
    return (
        f"{words} parallel.sequence splits dim 1 of a batch, its tokens; the functions of all tokens are listed in "
        f"docs/sequence-parallelism.md, attention, sums and means among them; colossus.layers.local(x) gives the "
        f"rank's part as a plain tensor, for code that takes care of it itself"
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
