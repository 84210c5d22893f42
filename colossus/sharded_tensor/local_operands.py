"""The local operands that a function gets: gathered tokens, or this rank's part of what all ranks have whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from colossus.comm.conjugate import conjugate
from colossus.layout.operators import tensors_of
from colossus.sharded_tensor.placement import Placement, part_of_whole, placement_of
from colossus.sharded_tensor.token_collectives import gather_tokens, select_own_tokens
from colossus.sharded_tensor.view_rules import SplitRole


def each_its_own(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with different objects for a tensor that is there twice, where tokens are split.

    A rule may ask for the tokens of all ranks in one of the two, and not in the other.
    """
    tensors = [x for x in tensors_of((args, kwargs)) if _has_tokens(x)]
    if not any(x is other for number, x in enumerate(tensors) for other in tensors[:number]):
        return args, kwargs
    seen: list[Tensor] = []

    def own(x: Tensor) -> Tensor:
        if placement_of(x) is None or not any(x is other for other in seen):
            seen.append(x)
            return x
        again: Any = x.as_subclass(type(x))
        again.placement = placement_of(x)
        return again

    return tree_map_only(Tensor, own, (args, kwargs))


def _has_tokens(x: Tensor) -> bool:
    placement = placement_of(x)
    return placement is not None and placement.place("sequence") is not None


def local_operand(x: Tensor, base: Placement, asked: Sequence[SplitRole], on_meta: bool) -> Tensor:
    """Return the local tensor that the function gets: with the tokens of all ranks, or a part of a plain tensor."""
    parallel = base.parallel
    if any(x is other for role in asked for other in role.gathered):
        place = placement_of(x).place("sequence")  # type: ignore[union-attr]
        assert place is not None
        whole = gather_tokens(x, place, parallel)
    else:
        whole = x
    plain = [(role.name, right, place) for role in asked for other, right, place in role.sliced if other is x]
    for role, right, place in plain:
        if role == "sequence":
            whole = select_own_tokens(whole, whole.dim() + right, place, parallel)
    if not _is_whole(x):
        return whole
    dims = {role: whole.dim() + right for role, right, _ in plain if role != "sequence"}
    if dims:
        return part_of_whole(whole, dims, base, on_meta=on_meta)
    return whole if on_meta else _summed_gradient(whole, base)


def _is_whole(x: Tensor) -> bool:
    """Return whether all tensor ranks have a tensor whole, as plain code has it."""
    placement = placement_of(x)
    return placement is None or placement.is_whole


def wants_sum(x: Tensor) -> bool:
    """Return whether a tensor that ranks have whole gets a gradient, to which each rank adds the share of its part."""
    return _is_whole(x) and x.requires_grad and torch.is_grad_enabled()


def _summed_gradient(x: Tensor, placement: Placement) -> Tensor:
    """Return a plain tensor with its gradient summed over the ranks that split the other operands."""
    if not placement.split_axes or not wants_sum(x):
        return x
    return conjugate(x, "identity", "sum", placement.parallel.context.group(placement.split_axes))
