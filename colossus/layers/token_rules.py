"""The functions of torch that work on each token by itself: for each a rule that says where its tokens are then.

A rule takes the arguments of its function and returns the `TokenDim` of what comes out, or raises `MixedTokensError`.
What has no rule, and does not work element by element, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from colossus.layers.token_dim import (
    ATTENTION,
    MixedTokensError,
    TokenDim,
    aligned,
    avoid,
    found,
    several,
    tokens_of,
    without,
)
from colossus.layers.token_index import assigned, indexed
from colossus.layers.token_products import PRODUCTS
from colossus.layers.token_shapes import SHAPES, given_dims

Rule = Callable[..., TokenDim]

_REQUIRED = object()


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, default: Any, *names: str) -> Any:
    """An argument, or several that were written one by one: ``flip(x, 0, 2)``."""
    for name in names:
        if name in kwargs:
            return kwargs[name]
    return args[position] if len(args) > position else default


def _along(position: int, default: Any = None) -> Rule:
    """Of functions along the dims that one argument names, which keep all dims."""

    def rule(*args: Any, **kwargs: Any) -> TokenDim:
        dims = _argument(args, kwargs, position, default, "dim", "dims", "axis")
        return avoid(args[0], several(dims))

    return rule


def _reduced(position: int, keep_position: int, default: Any = None) -> Rule:
    """Of functions that reduce the dims that one argument names."""

    def rule(*args: Any, **kwargs: Any) -> TokenDim:
        x, other = args[0], _argument(args, kwargs, 1, None, "other")
        if isinstance(other, Tensor):  # max(x, y)
            return aligned((x, other))
        dims = several(_argument(args, kwargs, position, default, "dim", "dims", "axis"))
        tokens = avoid(x, dims, "reduces")
        keeps = _argument(args, kwargs, keep_position, False, "keepdim", "keepdims")
        return tokens if keeps or dims is None else without(tokens, dims, x.dim())

    return rule


def _chosen(x: Tensor, dim: int, index: Any, *values: Any, **options: Any) -> TokenDim:
    """gather, scatter: along a dim, with indices and values for each token."""
    avoid(x, dim)
    return aligned([x, index, *values, *options.values()])


def _index_select(x: Tensor, dim: int, index: Tensor) -> TokenDim:
    if tokens_of(index) is not None:
        if tokens_of(x) is None and dim == 0:  # rows of a table
            return found(index)
        raise MixedTokensError("selects by indices that every token has its own of")
    return avoid(x, dim, "selects from")


def _removed(position: int, default: Any = _REQUIRED) -> Rule:
    """Of functions that take parts along one dim, which is gone then."""

    def rule(*args: Any, **kwargs: Any) -> TokenDim:
        dim = _argument(args, kwargs, position, default, "dim")
        return without(avoid(args[0], dim, "selects from"), dim, args[0].dim())

    return rule


def _joined(tensors: Sequence[Tensor], dim: int = 0, **options: Any) -> TokenDim:
    _require_all(tensors, "concatenates")
    avoid(next(x for x in tensors if tokens_of(x) is not None), options.get("axis", dim), "concatenates along")
    return aligned(tensors)


def _stacked(tensors: Sequence[Tensor], dim: int = 0, **options: Any) -> TokenDim:
    _require_all(tensors, "stacks")
    tokens, ndim = aligned(tensors), tensors[0].dim()
    left = tokens.dim + ndim
    return tokens.at(left + 1 if dim % (ndim + 1) <= left else left)


def _require_all(tensors: Sequence[Tensor], does: str) -> None:
    for x in tensors:
        if tokens_of(x) is None:
            raise MixedTokensError(
                f"{does} tokens, of which a rank has a part, and a plain tensor of shape {tuple(x.shape)}, which is "
                f"whole (a class token, say)"
            )


def _normalized(x: Tensor, normalized_shape: Sequence[int], *parameters: Any, **options: Any) -> TokenDim:
    return avoid(x, range(-len(normalized_shape), 0), "normalizes over")


def _batch_norm(
    x: Tensor, mean: Any, var: Any, weight: Any = None, bias: Any = None, training: bool = False, **rest: Any
) -> TokenDim:
    if training:
        raise MixedTokensError(
            "normalizes over the tokens of the batch", "LayerNorm, RMSNorm and GroupNorm have no statistics of a batch"
        )
    return avoid(x, 1, "has channels in")


def _per_sample(x: Tensor, *args: Any, **options: Any) -> TokenDim:
    """What works on each sample by itself: tokens that were flattened into the batch are samples."""
    return avoid(x, range(1, x.dim()), "works over")


def _pooled(count: int) -> Rule:
    return lambda x, *args, **options: avoid(x, range(-count, 0), "pools over")


def _padded(x: Tensor, pad: Sequence[int], *rest: Any, **options: Any) -> TokenDim:
    tokens = found(x)
    pair = 2 * (x.dim() - 1 - tokens.dim)
    if any(pad[pair : pair + 2]):
        raise MixedTokensError("adds tokens at the ends of each rank's part", "The engine pads: parallel.sequence.pad")
    return tokens


def _same(x: Any, *args: Any, **kwargs: Any) -> TokenDim:
    return found(x)


def _per_channel(x: Tensor, weight: Tensor) -> TokenDim:
    return found(x) if weight.numel() == 1 else avoid(x, 1, "has a weight for each of")


def _looked_up(ids: Tensor, *args: Any, **kwargs: Any) -> TokenDim:
    weight = args[0] if args else None
    if tokens_of(weight) is not None:
        raise MixedTokensError("looks tokens up by their number")
    return found(ids)


def _loss(*args: Any, **kwargs: Any) -> TokenDim:
    if kwargs.get("reduction", "mean") != "none":
        raise MixedTokensError("reduces all dims", "A loss belongs in the loss function, or takes reduction='none'")
    return aligned(args[:2])


def _cross_entropy(x: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> TokenDim:
    if kwargs.get("reduction", "mean") != "none":
        return _loss(**kwargs)
    return without(avoid(x, 1, "has classes in"), 1, x.dim())


def _similarity(x: Tensor, other: Tensor, dim: int = 1, eps: float = 0.0) -> TokenDim:
    tokens, ndim = aligned((x, other)), max(x.dim(), other.dim())
    if (tokens.dim + ndim) == dim % ndim:
        raise MixedTokensError(f"reduces dim {dim}, which holds the tokens")
    return without(tokens.at(tokens.dim + ndim), dim, ndim)


def _aligned(*args: Any, **kwargs: Any) -> TokenDim:
    return aligned([*(args[0] if isinstance(args[0], (tuple, list)) else args), *kwargs.values()])


def _refused(does: str, remedy: str = ATTENTION) -> Rule:
    def rule(*args: Any, **kwargs: Any) -> TokenDim:
        raise MixedTokensError(does, remedy)

    return rule


_RECURRENT = "runs over the tokens of one rank only, without what the ranks before it have seen"

#: by name of the function, without a trailing underscore
RULES: dict[str, Rule] = {
    **PRODUCTS, **SHAPES, "__getitem__": indexed, "__setitem__": assigned,
    **dict.fromkeys(("sum", "nansum", "mean", "nanmean", "prod", "amax", "amin", "all", "any", "logsumexp", "argmax",
                     "argmin", "max", "min", "median", "nanmedian", "aminmax"), _reduced(1, 2)),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), _reduced(1, 3)),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm"), _reduced(2, 3)),
    **dict.fromkeys(("quantile", "nanquantile"), _reduced(2, 3)),
    "kthvalue": _reduced(2, 3, -1), "mode": _reduced(1, 2, -1), "count_nonzero": _reduced(1, 99),
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "cummax", "cummin",
                     "logcumsumexp"), _along(1)),
    "flip": lambda x, *dims, **names: avoid(x, given_dims(0, *dims, **names)),
    **dict.fromkeys(("sort", "argsort", "glu"), _along(1, -1)),
    **dict.fromkeys(("topk", "diff", "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft"), _along(2, -1)),
    **dict.fromkeys(("roll",), _along(2)), "normalize": _along(2, 1), "gumbel_softmax": _along(4, -1),
    **dict.fromkeys(("chunk", "split", "split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split"),
                    _along(2, 0)),
    "narrow": _along(1, _REQUIRED), "unfold": _along(1, _REQUIRED),
    "select": _removed(1), "unbind": _removed(1, 0),
    "gather": _chosen, "scatter": _chosen, "scatter_add": _chosen, "index_select": _index_select,
    "take_along_dim": lambda x, index, dim=None: _chosen(x, dim, index),
    "cat": _joined, "concat": _joined, "concatenate": _joined, "stack": _stacked,
    "broadcast_tensors": _aligned,
    "pad": _padded, "one_hot": _same, "embedding": _looked_up,
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalized), "batch_norm": _batch_norm,
    "group_norm": _per_sample, "instance_norm": _per_sample, "prelu": _per_channel,
    **{f"{kind}_pool{n}d": _pooled(n) for n in (1, 2, 3) for kind in ("max", "avg", "adaptive_max", "adaptive_avg")},
    # random, element by element: every part of a sequence draws its own
    **dict.fromkeys(("dropout", "alpha_dropout", "rrelu", "bernoulli", "rand_like", "randn_like", "randint_like",
                     "empty_like", "zeros_like", "ones_like", "full_like", "normal", "uniform", "cpu", "cuda",
                     "__deepcopy__"), _same),
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div",
                     "binary_cross_entropy_with_logits"), _loss),
    "cross_entropy": _cross_entropy, "nll_loss": _cross_entropy,
    "cosine_similarity": _similarity, "pairwise_distance": lambda x, other, *_, **__: _similarity(x, other, -1),
    **dict.fromkeys(("multi_head_attention_forward", "_native_multi_head_attention"),
                    _refused("attends to the tokens of one rank only")),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _refused(_RECURRENT)),
    **dict.fromkeys(("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__",
                     "__contains__", "equal", "allclose", "is_nonzero"),
                    _refused("reads the values of one rank, so that ranks may go different ways", "")),
}  # fmt: skip
