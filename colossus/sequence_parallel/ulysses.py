"""Ulysses (2309.14509): all-to-alls between tokens split over ranks and heads split over ranks.

Between the two exchanges a rank holds all tokens of the group, for its share of the heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from colossus.comm.conjugate import conjugate
from colossus.context.groups import AxisGroup
from colossus.error_place import located_error

_HEADS, _TOKENS = 1, 2
#: up to here queries, keys and values are exchanged in one call: a small exchange costs its latency, a large one its
#: bytes and the copy that concatenates them (measured: equal at 3 MB)
_COALESCE_BYTES = 4 << 20


def to_heads(q: Tensor, k: Tensor, v: Tensor, group: AxisGroup) -> tuple[Tensor, Tensor, Tensor]:
    """From s tokens of all heads to all U s tokens of the group, for 1 / U of the heads.

    Backward exchanges the gradients the other way, as `to_tokens` does with the output.

    Shape:
        q [batch, heads, s, head_dim] -> [batch, heads / U, U s, head_dim]; k and v the same with kv_heads. Tokens are
        concatenated in the order of the ranks.

    Raises:
        ValueError: when the U ranks of the group divide not both numbers of heads.
    """
    ranks = group.size
    if ranks == 1:
        return q, k, v
    heads, kv_heads = q.shape[_HEADS], k.shape[_HEADS]
    require_heads(heads, kv_heads, ranks)
    if q.nbytes + k.nbytes + v.nbytes > _COALESCE_BYTES:
        return _exchange(q, group), _exchange(k, group), _exchange(v, group)
    by_rank = [x.unflatten(_HEADS, (ranks, -1)) for x in (q, k, v)]
    coalesced = torch.cat(by_rank, dim=_HEADS + 1).flatten(_HEADS, _HEADS + 1)  # the heads of one rank side by side
    received = _exchange(coalesced, group)
    local_q, local_k, local_v = received.split([heads // ranks, kv_heads // ranks, kv_heads // ranks], dim=_HEADS)
    return local_q, local_k, local_v


def to_tokens(out: Tensor, group: AxisGroup) -> Tensor:
    """The inverse of `to_heads`: [batch, heads / U, U s, head_dim] -> [batch, heads, s, head_dim]."""
    return conjugate(out, "all_to_all", "all_to_all", group, dim=_HEADS, to_dim=_TOKENS)


def _exchange(x: Tensor, group: AxisGroup) -> Tensor:
    return conjugate(x, "all_to_all", "all_to_all", group, dim=_TOKENS, to_dim=_HEADS)


def require_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Check that heads can be split.

    Raises:
        ValueError: when they cannot.
    """
    for what, count in (("heads", heads), ("key/value heads", kv_heads)):
        if count % ranks:
            raise located_error(
                f"sequence parallelism by exchange of heads (ulysses): {count} {what} on each tensor rank do not "
                f"divide over {ranks} ranks, heads are split whole; use a number of ranks that divides {heads} heads "
                f"and {kv_heads} key/value heads, or mode='ring', which sets no condition on heads"
            )
