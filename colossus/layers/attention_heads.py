"""Heads of an attention written by hand: from features to heads and back, also where a rank holds some of them."""

from __future__ import annotations

from torch import Tensor

from colossus.arithmetic import either, nearest_multiples, not_a_multiple
from colossus.error_place import located_error
from colossus.sharded_tensor.tensor import ShardedTensor


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, .., tokens, heads * head_dim] -> [batch, .., heads, tokens, head_dim], for an attention of one's own.

    Of features that are split, as ``Linear(split="column")`` leaves them, the rank's heads: what works on each head by
    itself is right on them, ``F.scaled_dot_product_attention`` with a mask in the whole layout. It is
    ``x.unflatten(-1, (-1, head_dim)).transpose(-3, -2)``, with the checks below.

    Args:
        heads: of all ranks; of keys and values it may be fewer than of queries (``enable_gqa=True``).

    Raises:
        ValueError: for heads that do not divide the features, or over the ranks; and where tokens are split.
    """
    ways, axes, shape = 1, "", tuple(x.shape)
    if isinstance(x, ShardedTensor):
        activation = x.placement.activation
        if activation.features:
            ways, axes = x.placement.parallel.context.size(activation.features), ",".join(activation.features)
        if x.placement.place("tokens") is not None:
            raise located_error(
                f"split_heads: tokens are split ({activation}), and an attention must see them all. Between blocks "
                f'colossus.layers.Linear(split="column") gathers them; under parallel.sequence use '
                f"colossus.layers.Attention, which passes keys and values between the ranks"
            )
        if x.placement.num_features is not None:
            raise located_error(
                f"split_heads: these {x.placement.num_features} features are padded, as a vocabulary is; no heads"
            )
    features = shape[-1] * ways
    if heads < 1 or features % heads:
        raise located_error(f"split_heads: {not_a_multiple('features', features, f'heads = {heads}', max(heads, 1))}")
    if heads % ways:
        raise located_error(
            f"split_heads: heads = {heads} does not divide over the {ways} ranks of {axes}; heads are split whole: "
            f"take {either(nearest_multiples(heads, ways))}, or colossus.layers.to_whole(x) first"
        )
    if len(shape) < 3:
        raise located_error(f"split_heads: x has shape {shape}; it takes [batch, .., tokens, heads * head_dim]")
    return x.unflatten(-1, (-1, features // heads)).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """[batch, .., heads, tokens, head_dim] -> [batch, .., tokens, heads * head_dim], the inverse of `split_heads`.

    Of a rank's heads it gives split features, which ``Linear(split="row")`` takes.
    """
    if x.dim() < 4:
        raise located_error(f"merge_heads: x has shape {tuple(x.shape)}; it takes [batch, .., heads, tokens, head_dim]")
    return x.transpose(-3, -2).flatten(-2)
