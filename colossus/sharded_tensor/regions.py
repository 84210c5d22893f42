"""Moves of activations between the layouts of a model: gathered, split, or taken as the rank's part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from colossus.error_place import located_error
from colossus.layout.activation import Activation
from colossus.layout.redistribute import move
from colossus.sharded_tensor.placement import HasRegions, Place, Placement
from colossus.sharded_tensor.tensor import ShardedTensor, mark, plain, wrap
from colossus.sharded_tensor.token_collectives import gather_tokens, select_own_tokens


def with_sequence(x: Tensor, place: Place | None, parallel: HasRegions) -> Tensor:
    """Mark a plain tensor of the whole region as a sequence rank's part of the tokens, unless ``place`` is None."""
    whole = parallel.regions.whole
    return x if place is None else mark(x, Placement(parallel, whole, whole, (("sequence", place),)))


def sequence_place(x: Any) -> Place | None:
    """Return the dim in which a tensor has a sequence rank's part of the tokens, or None."""
    return x.placement.place("sequence") if isinstance(x, ShardedTensor) else None


def as_aligned(x: Tensor, target: Place | None, parallel: HasRegions) -> Tensor:
    """Return a tensor of a sequence rank's tokens with the tokens of a slice on the ranks that ``target`` says."""
    place = sequence_place(x)
    if not isinstance(x, ShardedTensor) or place is None or target is None or place.window == target.window:
        return x
    whole = gather_tokens(plain(x), place, parallel)
    moved_to = place._replace(window=target.window)
    return mark(
        select_own_tokens(whole, place.dim, moved_to, parallel), replace(x.placement, places=(("sequence", moved_to),))
    )


def local(x: Tensor) -> Tensor:
    """Return the rank's part of a tensor as a plain one, for code that handles a part of the tokens itself.

    No function refuses the result. A tensor without a sequence rank's tokens is returned as it is.

    Shape:
        [batch, tokens / ranks, ..] -> the same; which tokens they are says `colossus.sequence_parallel`.

    Raises:
        ValueError: for an activation whose features are split: ``to_whole(x)`` comes first.
    """
    if isinstance(x, ShardedTensor) and not x.placement.is_whole:
        if x.placement.place("sequence") is None:
            return x
        raise located_error(f"local: {x!r} has split features, too: call colossus.layers.to_whole(x) first")
    return plain(x)


def to_whole(x: Tensor) -> Tensor:
    """Return the activation in the whole layout: all features on every rank, gradient complete.

    Plain torch is right on it; under ``parallel.sequence`` functions of each token by itself are (see `ShardedTensor`).
    """
    if not isinstance(x, ShardedTensor) or x.placement.is_whole:
        return x
    return moved(x, x.placement.parallel.regions.whole)


def moved(
    x: Tensor, target: Activation, parallel: HasRegions | None = None, *, return_layout: Activation | None = None
) -> Tensor:
    """Move an activation to the layout ``target``.

    Args:
        parallel: of the model, for a plain tensor, which does not know it.
        return_layout: its return layout then; None: ``target``.
    """
    if parallel is None:
        assert isinstance(x, ShardedTensor)
        parallel = x.placement.parallel
    return_layout = return_layout or target
    part, placement = unwrap(x, parallel)
    if placement.activation == target and placement.return_layout == return_layout:
        return x
    num_features = placement.num_features
    out = move(part, placement.activation, target, parallel.context)
    if num_features is not None and not target.features:
        out, num_features = out[..., :num_features], None
    sequence = placement.place("sequence")
    return wrap(out, Placement.standard(parallel, target, return_layout, out.dim(), sequence, num_features))


def require_sequences(x: Tensor) -> None:
    """Raise ValueError if x has a sequence rank's tokens and is not [batch, tokens, features]."""
    place = sequence_place(x)
    if place is not None and place != Place(plain(x).dim() - 2):
        raise _misplaced(x, place, "[batch, tokens, features]")


def unwrap(x: Tensor, parallel: HasRegions, num_features: int = 1) -> tuple[Tensor, Placement]:
    """Return the plain local tensor for a layer, and its placement; a plain tensor is in the whole layout.

    Raises:
        ValueError: the split dims are not those in which layers take them, or the last ``num_features`` dims have
            tokens.
    """
    if not isinstance(x, ShardedTensor):
        return x, parallel.whole_placement
    placement, local = x.placement, plain(x)
    place = placement.place("sequence")
    if place is not None and place.dim >= local.dim() - num_features:
        raise _misplaced(x, place, f"features in the last {num_features} dims" if num_features > 1 else "features last")
    if placement.parallel is not parallel:
        raise located_error(
            f"an activation of {placement.parallel.context} is passed to a layer of {parallel.context}: a model "
            f"belongs to one context; where several are alive, run it inside of `with context:`"
        )
    if not placement.is_standard(local.dim()):
        raise located_error(
            f"{x!r}: its split dims are not those that layers take: features in the last dim, samples in the first, "
            f"whole. Heads become features again by colossus.layers.merge_heads(x), or x.transpose(1, 2).flatten(-2)"
        )
    return local, placement


def _misplaced(x: Tensor, place: Place, takes: str) -> ValueError:
    shape = tuple(plain(x).shape)
    return located_error(f"a layer takes {takes}, but its input of local shape {shape} has tokens in dim {place.dim}")
