"""What an engine holds between steps, counted by kind: of real tensors, and of fake ones."""

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
    """Of one rank, between steps; see `colossus.planner.rank_memory.StoredBytes`."""

    weights: int
    gradients: int
    optimizer: int

    @classmethod
    def of(cls, engine: Engine) -> EngineBytes:
        """Counted: a storage that several tensors share counts once."""
        stored, optimizer = engine.store.parameters(), engine.optimizer
        whole = [param for block in engine.store.blocks for param in block.params]
        state: list[Any] = list(optimizer.state.values())
        state += [held.counts for held in vars(optimizer).values() if isinstance(held, Sums)]
        if isinstance(optimizer, Adafactor):
            state.append(optimizer.tensor_state)
        if isinstance(optimizer, WholeParameters):  # of which owners have values and gradients, too
            owned = [param for group in optimizer.inner.param_groups for param in group["params"]]
            state += [owned, [param.grad for param in owned], list(optimizer.inner.state.values())]
        gradients = sum(param.grad.nbytes for param in stored if param.grad is not None)
        return cls(bytes_of([*stored, *engine.model.buffers(), *whole]), gradients, bytes_of(tree_leaves(state)))


def bytes_of(held: Iterable[Any]) -> int:
    """Of the storages of those that are tensors."""
    with as_shards():  # `.data` of a fake tensor would take back memory that is free
        storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in held if isinstance(x, Tensor)}
    return sum(storages.values())
