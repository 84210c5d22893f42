"""Products of tokens with matrices, and the products that bring tokens together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from colossus.layers.token_dim import MixedTokensError, TokenDim, aligned, avoid, found, require_one, tokens_of

_POINTS = "A product over tokens is an attention: colossus.layers.Attention passes keys and values between the ranks"


def _right(x: Tensor) -> TokenDim | None:
    """The token dim from the right."""
    tokens = tokens_of(x)
    return None if tokens is None else tokens.at(tokens.dim - x.dim())


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> TokenDim:
    if tokens_of(weight) is not None or tokens_of(bias) is not None:
        raise MixedTokensError("takes tokens for a weight", _POINTS)
    return avoid(x, -1, "sums over")


def _matmul(a: Tensor, b: Tensor) -> TokenDim:
    at_a, at_b = _right(a), _right(b)
    if (at_a and at_a.dim == -1) or (at_b and (at_b.dim == -2 or b.dim() == 1)):
        raise MixedTokensError("sums over the tokens", _POINTS)
    if at_a and at_b:
        if at_a != at_b or at_a.dim > -3:
            raise MixedTokensError("multiplies tokens with tokens", _POINTS)
        return at_a
    at = at_a or at_b
    assert at is not None
    if at.dim < -2:
        require_one(b if at_a else a, at.dim)
    if (a.dim() == 1 and at.dim < -1) or b.dim() == 1:  # the vector's dim is gone
        return at.at(at.dim + 1)
    return at


def _added_product(x: Tensor, a: Tensor, b: Tensor, **factors: Any) -> TokenDim:
    if tokens_of(a) is None and tokens_of(b) is None:
        raise MixedTokensError("adds a plain product to tokens, of which a rank has a part")
    at = _matmul(a, b)
    if tokens_of(x) is None:
        require_one(x, at.dim)
    elif _right(x) != at:
        raise MixedTokensError("adds tokens in different dims")
    return at


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> TokenDim:
    of_query, others = _right(query), [x for x in (key, value, attn_mask) if x is not None]
    across = "looks at the tokens of one rank only, as queries, keys or values"
    if any((at := _right(x)) is not None and at.dim > -3 for x in (key, value)) or not of_query:
        raise MixedTokensError(across, _POINTS)
    if of_query.dim > -3 and (of_query.dim == -1 or is_causal or any(_right(x) for x in (key, value))):
        raise MixedTokensError(across, _POINTS)
    if of_query.dim == -2:  # each token looks at something whole
        return aligned([query, *others[2:]])
    return aligned([query, *others])


def _bilinear(x: Tensor, other: Tensor, weight: Tensor, bias: Tensor | None = None) -> TokenDim:
    if tokens_of(weight) is not None:
        raise MixedTokensError("takes tokens for a weight", _POINTS)
    at = aligned((x, other))
    if at.dim == -1:
        raise MixedTokensError("sums over the tokens", _POINTS)
    return at


def _einsum(equation: Any, *operands: Any) -> TokenDim:
    if not isinstance(equation, str):
        raise MixedTokensError("is only understood with an equation", "einsum('bth,hk->btk', x, w)")
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        letters = left.replace(",", "").replace("...", "")
        right = "..." * ("..." in left) + "".join(sorted(each for each in set(letters) if letters.count(each) == 1))
    labels = [_labels(term, x.dim()) for term, x in zip(terms, given, strict=True)]
    width = max((len(each) for each in labels), default=0)
    at = [(each[tokens.dim], tokens) for each, x in zip(labels, given, strict=True) if (tokens := tokens_of(x))]
    letter, tokens = at[0]
    if any((other, where[1:]) != (letter, tokens[1:]) for other, where in at):
        raise MixedTokensError("multiplies tokens with tokens", _POINTS)
    for each, x in zip(labels, given, strict=True):
        if each.count(letter) > 1:
            raise MixedTokensError("takes a diagonal of the tokens", _POINTS)
        if tokens_of(x) is None and letter in each:
            require_one(x, each.index(letter) - len(each))
    dots = sorted({each for term in labels for each in term if isinstance(each, int)}, reverse=True)
    out = _labels(right, len(right.replace("...", "")) + len(dots) * ("..." in right)) if width else []
    if letter not in out:
        raise MixedTokensError("sums over the tokens", _POINTS)
    return tokens.at(out.index(letter))


def _labels(term: str, ndim: int) -> list[str | int]:
    """The letters of a term's dims; those of its dots count from the right, from 1 on."""
    before, dots, after = term.partition("...")
    count = ndim - len(before) - len(after) if dots else 0
    return [*before, *range(count, 0, -1), *after]


def _convolution(count: int) -> Callable[..., TokenDim]:
    """Of ``count`` dims. Right for tokens in the batch, or in a dim along which the kernel is one wide."""

    def rule(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> TokenDim:
        tokens = found(x)
        place = tokens.dim - (x.dim() - count)
        if place == -1 or (place < 0 and x.dim() == count + 1):
            raise MixedTokensError("sums over the tokens, which are its channels (dim 1)", _WINDOW)
        if place >= 0:
            wide = weight.shape[2 + place], _of(stride, place), _of(padding, place)
            if wide[:2] != (1, 1) or wide[2] not in (0, "valid", "same"):
                raise MixedTokensError(
                    f"looks at neighbours: its kernel is {wide[0]} wide along the tokens (stride {wide[1]}, padding "
                    f"{wide[2]})",
                    _WINDOW,
                )
        return tokens

    return rule


_WINDOW = "Neighbours may be on another rank: a kernel of 1 is right, and colossus.layers.Attention looks at all tokens"


def _of(value: Any, place: int) -> Any:
    return (
        value[place if len(value) > 1 else 0] if isinstance(value, Sequence) and not isinstance(value, str) else value
    )


def _refused(*args: Any, **kwargs: Any) -> TokenDim:
    raise MixedTokensError("multiplies all with all", _POINTS)


#: by name of the function, without a trailing underscore
PRODUCTS: dict[str, Callable[..., TokenDim]] = {
    "linear": _linear,
    "bilinear": _bilinear,
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot", "__matmul__"), _matmul),
    "__rmatmul__": lambda b, a: _matmul(a, b),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), _added_product),
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
    **{f"conv{count}d": _convolution(count) for count in (1, 2, 3)},
    **dict.fromkeys(("outer", "ger", "kron", "cdist", "tensordot", "inner", "addbmm"), _refused),
}
