"""Which dim of a tensor holds the tokens, after a function that works on each token by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

#: what a message says to do instead
ATTENTION = (
    "Tokens meet in colossus.layers.Attention and TransformerBlock, which look at those of the other ranks too, and "
    "tell documents apart"
)
POSITIONS = (
    "Positions are those of colossus.layers.PositionEmbedding, or rotary=True of colossus.layers.Attention, which know "
    "which tokens a rank has; a tensor like x is torch.zeros_like(x)"
)


class TokenDim(NamedTuple):
    """Where the tokens are. Flattened with other dims, they are the middle of ``before`` x tokens x ``after``.

    Attributes:
        dim: from the left; negative from the right, in the answer of a rule that need not know the number of dims.
    """

    dim: int
    before: int = 1
    after: int = 1

    def count(self, shape: Sequence[int]) -> int:
        """The tokens of this rank."""
        return shape[self.dim] // (self.before * self.after)

    def at(self, dim: int) -> TokenDim:
        return TokenDim(dim, self.before, self.after)


class MixedTokensError(Exception):
    """A function is none of each token by itself, or is not known to be: its message says what it does.

    Attributes:
        remedy: what to do instead.
    """

    def __init__(self, what: str, remedy: str = ATTENTION) -> None:
        super().__init__(what)
        self.remedy = remedy


def tokens_of(x: object) -> TokenDim | None:
    """Where a tensor holds the tokens; None for a plain tensor and for anything else."""
    return getattr(x, "token_dim", None) if isinstance(x, Tensor) and type(x) is not Tensor else None


def found(x: object) -> TokenDim:
    """`tokens_of` a tensor that must have them."""
    tokens = tokens_of(x)
    if tokens is None:
        raise MixedTokensError("is not known to work on each token by itself when tokens come as this argument")
    return tokens


def several(dims: Any) -> tuple[int, ...] | None:
    """Dims that were given as one, as several, or not at all: then all are meant."""
    if dims is None or isinstance(dims, bool) or (isinstance(dims, (tuple, list)) and not dims):
        return None
    return tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)


def avoid(x: Tensor, dims: Sequence[int] | int | None, does: str = "works along") -> TokenDim:
    """The token dim of x; an error when it is among ``dims`` (None: all)."""
    tokens, ndim = found(x), x.dim()
    if dims is None:
        raise MixedTokensError(f"{does} all dims at once, those of the tokens too")
    for dim in (dims,) if isinstance(dims, int) else dims:
        if not isinstance(dim, int):
            raise MixedTokensError(f"{does} {dim!r}, which is not known to leave tokens alone")
        if dim % ndim == tokens.dim:
            raise MixedTokensError(f"{does} dim {dim}, which holds the tokens")
    return tokens


def aligned(operands: Sequence[object]) -> TokenDim:
    """The token dim, from the right, of what operands that meet element by element give."""
    known = [(x, tokens) for x in operands if (tokens := tokens_of(x)) is not None]
    first, tokens = known[0]
    at = tokens.at(tokens.dim - first.dim())  # type: ignore[attr-defined]
    for other, where in known[1:]:
        if where.at(where.dim - other.dim()) != at:  # type: ignore[attr-defined]
            raise MixedTokensError(
                f"brings tokens in dim {tokens.dim} of a tensor of shape {tuple(first.shape)} together with "  # type: ignore[attr-defined]
                f"tokens in dim {where.dim} of one of shape {tuple(other.shape)}"  # type: ignore[attr-defined]
            )
    for x in operands:
        if isinstance(x, Tensor) and tokens_of(x) is None:
            require_one(x, at.dim)
    return at


def require_one(x: Tensor, dim: int) -> None:
    """That a plain tensor is broadcast over the tokens, whose dim is ``dim`` from the right."""
    if x.dim() >= -dim and x.shape[dim] != 1:
        raise MixedTokensError(
            f"lets dim {x.dim() + dim} of a plain tensor of shape {tuple(x.shape)}, which is whole, meet the tokens, "
            f"of which a rank has a part",
            POSITIONS,
        )


def without(tokens: TokenDim, dims: Sequence[int] | int, ndim: int) -> TokenDim:
    """The token dim once other dims are gone."""
    gone = {dim % ndim for dim in ((dims,) if isinstance(dims, int) else dims)}
    return tokens.at(tokens.dim - sum(dim < tokens.dim for dim in gone))


def regrouped(tokens: TokenDim, source: Sequence[int], target: Sequence[int], inferred: int | None = None) -> TokenDim:
    """Where the tokens are after a reshape, which keeps the order of the elements.

    Args:
        inferred: the dim whose size was left open (-1), if one was.
    """
    count = tokens.count(source)
    inner = tokens.after * math.prod(source[tokens.dim + 1 :])
    if math.prod(source) != math.prod(target):
        raise MixedTokensError("reads the elements as another dtype", "")
    candidates = []
    stride = 1
    for dim in range(len(target) - 1, -1, -1):
        extent = target[dim] * stride
        if stride and inner and inner % stride == 0 and extent % (inner * count) == 0:
            after = inner // stride
            candidates.append(TokenDim(dim, target[dim] // (count * after), after))
        stride = extent
    is_open = len(candidates) > 1  # a rank has one token, which fits anywhere
    if is_open:
        ones = [each for each in candidates if target[each.dim] == 1]
        candidates = ones or [each for each in candidates if each.dim == inferred]
    if len(candidates) != 1:
        what = "leaves open which dim holds the one token of a rank" if is_open else "takes the tokens apart"
        raise MixedTokensError(
            f"{what}: from shape {tuple(source)}, tokens in dim {tokens.dim}, to {tuple(target)}",
            "A reshape must keep the tokens together in one dim, whose size may be left open (-1)",
        )
    return candidates[0]
