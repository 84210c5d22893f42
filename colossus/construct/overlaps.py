"""Parameters that a constructor has put into the memory of others: `p.data = q.data`, parts of one tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from colossus.construct.init_trace import InitTrace
from colossus.construct.traced_value import traced_shards

#: the name of a parameter, the tensor with its values, whether it trains
Named = tuple[str, Tensor, bool]


def check_overlaps(model: nn.Module, trace: InitTrace) -> None:
    """Keep the values of memory that several parameters share.

    Raises:
        ValueError: two parameters, not tied, share an element, and one of them trains: ranks store each separately, so
            that their values would diverge.
    """
    by_memory: dict[int, list[Named]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        for source in [shard.init.tensor for shard in traced_shards(parameter)] or [parameter]:
            if torch._C._has_storage(source):
                by_memory[source.untyped_storage()._cdata].append((name, source, parameter.requires_grad))
    for sharing in by_memory.values():
        if len(sharing) > 1:
            trace.keep(sharing[0][1])
            if any(trains for *_, trains in sharing):
                _require_apart(sorted(sharing, key=lambda named: named[1].storage_offset()))


def _require_apart(sharing: Sequence[Named]) -> None:
    """Raise ValueError if two tensors share an element; they are in the order of their first elements."""
    stops = [
        x.storage_offset() + 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        for _, x, _ in sharing
    ]
    if all(stop <= x.storage_offset() for stop, (_, x, _) in zip(stops, sharing[1:], strict=False)):
        return
    owners = torch.full((max(stops),), -1, dtype=torch.int32)
    for index, (name, x, _) in enumerate(sharing):
        own = owners.as_strided(x.shape, x.stride(), x.storage_offset())
        if (others := own[own >= 0]).numel():
            raise ValueError(
                f"{name} and {sharing[int(others[0])][0]} share memory, but are two parameters (.data = other.data, or "
                f"nn.Parameter(other[..])), which each rank stores separately: tie them (one.weight = other.weight), "
                f"or copy values (.data.copy_(..), nn.Parameter(other.clone()))"
            )
        own.fill_(index)
