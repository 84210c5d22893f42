"""The bytes that an engine stores between steps, counted by kind on real or fake tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from colossus.engine.engine import Engine
from colossus.layout.split_parameter import as_shards
from colossus.optim.adafactor import Adafactor
from colossus.optim.logical_tensors import Sums
from colossus.optim.whole import WholeParameters


@dataclass(frozen=True)
class EngineBytes:
    """Bytes that one rank stores between steps; see `colossus.planner.rank_memory.StoredBytes`."""

    weights: int
    gradients: int
    optimizer: int

    @classmethod
    def of(cls, engine: Engine) -> EngineBytes:
        """Count the bytes of an engine. A storage that several tensors share counts once."""
        stored, optimizer = engine.store.parameters(), engine.optimizer
        whole = [param for block in engine.store.blocks for param in block.params]
        state: list[Any] = list(optimizer.state.values())
        state += [value.counts for value in vars(optimizer).values() if isinstance(value, Sums)]
        if isinstance(optimizer, Adafactor):
            state.append(optimizer.tensor_state)
        if isinstance(optimizer, WholeParameters):  # owners also have whole values and gradients
            owned = [param for group in optimizer.inner.param_groups for param in group["params"]]
            state += [owned, [param.grad for param in owned], list(optimizer.inner.state.values())]
        gradients = sum(param.grad.nbytes for param in stored if param.grad is not None)
        return cls(bytes_of([*stored, *engine.model.buffers(), *whole]), gradients, bytes_of(tree_leaves(state)))


def bytes_of(values: Iterable[Any]) -> int:
    """Return the bytes of the storages of those values that are tensors."""
    with as_shards():  # `.data` of a fake tensor would take back freed memory
        storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in values if isinstance(x, Tensor)}
    return sum(storages.values())
