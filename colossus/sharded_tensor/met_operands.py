"""Operands as a function is given them: with the tokens of all ranks, or the part of one that ranks have whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from colossus.comm.conjugate import conjugate
from colossus.layout.operators import tensors_of
from colossus.sharded_tensor.placement import Placement, part_of_whole, placement_of
from colossus.sharded_tensor.token_collectives import own_tokens, whole_tokens
from colossus.sharded_tensor.view_rules import At


def each_its_own(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of which none is another, where tokens are split: of one tensor twice one may be gathered."""
    tensors = [x for x in tensors_of((args, kwargs)) if _has_tokens(x)]
    if not any(x is other for number, x in enumerate(tensors) for other in tensors[:number]):
        return args, kwargs
    met: list[Tensor] = []

    def own(x: Tensor) -> Tensor:
        if placement_of(x) is None or not any(x is other for other in met):
            met.append(x)
            return x
        again: Any = x.as_subclass(type(x))
        again.placement = placement_of(x)
        return again

    return tree_map_only(Tensor, own, (args, kwargs))


def _has_tokens(x: Tensor) -> bool:
    placement = placement_of(x)
    return placement is not None and placement.place("sequence") is not None


def as_met(x: Tensor, base: Placement, asked: Sequence[At], on_meta: bool) -> Tensor:
    """Return an operand as the function is given it: with the tokens of all ranks, or a plain one's part."""
    parallel = base.parallel
    if any(x is other for at in asked for other in at.gathered):
        place = placement_of(x).place("sequence")  # type: ignore[union-attr]
        assert place is not None
        whole = whole_tokens(x, place, parallel)
    else:
        whole = x
    met = [(at.role, right, place) for at in asked for other, right, place in at.met if other is x]
    for role, right, place in met:
        if role == "sequence":
            whole = own_tokens(whole, whole.dim() + right, place, parallel)
    if not _is_whole(x):
        return whole
    dims = {role: whole.dim() + right for role, right, _ in met if role != "sequence"}
    if dims:
        return part_of_whole(whole, dims, base, on_meta=on_meta)
    return whole if on_meta else _summed_gradient(whole, base)


def _is_whole(x: Tensor) -> bool:
    """Return whether tensor ranks have all of a tensor, but for what they split of plain ones."""
    placement = placement_of(x)
    return placement is None or placement.is_whole


def wants_sum(x: Tensor) -> bool:
    """Return whether a tensor that ranks have whole gets a gradient: of what they split it is that of one part."""
    return _is_whole(x) and x.requires_grad and torch.is_grad_enabled()


def _summed_gradient(x: Tensor, placement: Placement) -> Tensor:
    """Return a plain tensor with its gradient summed over the ranks that split what it meets."""
    if not placement.split_axes or not wants_sum(x):
        return x
    return conjugate(x, "identity", "sum", placement.parallel.context.group(placement.split_axes))
