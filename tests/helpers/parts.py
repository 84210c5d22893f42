"""Tensors as the parts of them that two ranks hold, in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from colossus.layers.model_parallel import BatchInfo
from colossus.layout.activation import Activation
from colossus.sharded_tensor.placement import Place, Placement
from colossus.sharded_tensor.tensor import mark, plain, wrap
from colossus.tensor_parallel.mode import Regions

_WHOLE = Activation()
#: stands for what layers know of two ranks
TWO_RANKS: Any = SimpleNamespace(
    context=SimpleNamespace(size=lambda axes: 2),
    regions=Regions(_WHOLE, _WHOLE, _WHOLE),
    sequence=SimpleNamespace(num_shards=2),
    batch_info=BatchInfo(),
)
#: role -> the axes of a tensor of which it is split
_ACTIVATIONS = {
    "sequence": _WHOLE,
    "batch": Activation(batch=("tensor",)),
    "tokens": Activation(tokens=("tensor",)),
    "features": Activation(features=("tensor",)),
}


def part(x: Tensor, role: str, dim: int) -> Tensor:
    """One rank's part as a `ShardedTensor`."""
    return mark(x, Placement(TWO_RANKS, _ACTIVATIONS[role], _WHOLE, ((role, Place(dim)),)))


def laid_out(x: Tensor, activation: Activation, parallel: Any, return_layout: Activation | None = None) -> Tensor:
    """A rank's plain tensor as an activation between layers."""
    return wrap(x, Placement.standard(parallel, activation, return_layout or activation, x.dim()))


def part_of_tokens(*shape: int) -> Tensor:
    """Numbers whose dim 1 holds a sequence rank's tokens."""
    return part(torch.randn(*shape, generator=torch.Generator().manual_seed(0)), "sequence", 1)


def joined(parts: list[Any], role: str) -> Tensor:
    """The whole tensor of the parts of all ranks."""
    place = parts[0].placement.place(role)
    count = place.count(plain(parts[0]).shape)
    apart = [plain(each).unflatten(place.dim, (place.before, count, place.after)) for each in parts]
    return torch.cat(apart, place.dim + 1).flatten(place.dim, place.dim + 2)
