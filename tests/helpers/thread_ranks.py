"""Ranks as threads of one process: their collectives wait for one another, forward and backward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.layers.model_parallel import BatchInfo
from colossus.layout import redistribute
from colossus.layout.activation import Activation
from colossus.sequence_parallel.modes import Ring, Ulysses
from colossus.sequence_parallel.split import SequenceSplit
from colossus.sharded_tensor import token_collectives as tokens
from colossus.sharded_tensor.placement import Place, Placement
from colossus.sharded_tensor.tensor import mark, plain
from colossus.tensor_parallel.mode import Regions

_WHOLE = Activation()
#: role -> the axes of a tensor of which it is split
_ACTIVATIONS = {
    "sequence": _WHOLE,
    "batch": Activation(batch=("tensor",)),
    "tokens": Activation(tokens=("tensor",)),
    "features": Activation(features=("tensor",)),
}


class ThreadRanks:
    """Two ranks that split one role of tensors: the tokens of a sequence in the zigzag order of a ring, or one after
    the other, as under Ulysses."""

    size = 2

    def __init__(self, role: str, ring: bool) -> None:
        self.role = role
        self._here = threading.local()
        context = SimpleNamespace(
            size=lambda axes: self.size, index=lambda axes: self._here.rank, group=lambda axes: self,
            grid=SimpleNamespace(sizes={"tensor": self.size}),
        )  # fmt: skip
        sequence: Any = object.__new__(SequenceSplit)
        vars(sequence).update(
            _context=context, mode=Ring if ring else Ulysses, axes=("sequence",), num_shards=self.size,
            _ring_size=self.size if ring else 1, _ulysses_size=1 if ring else self.size, _positions={},
            chunks=2,
        )  # fmt: skip
        self.parallel: Any = SimpleNamespace(
            context=context, regions=Regions(_WHOLE, _WHOLE, _WHOLE), sequence=sequence, batch_info=BatchInfo()
        )

    def part(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a tensor that is split in ``dim``."""
        place = Place(dim)
        local = (
            tokens.select_own_tokens(x, dim, place, self.parallel) if self.role == "sequence" else self.chunk(x, dim)
        )
        return mark(local, Placement(self.parallel, _ACTIVATIONS[self.role], _WHOLE, ((self.role, place),)))

    def whole(self, x: Any) -> Tensor:
        """Return the whole of what a rank has computed."""
        placement = getattr(x, "placement", None)
        place = placement and placement.place(self.role)
        if place is None:
            return x  # type: ignore[no-any-return]
        if self.role == "sequence":
            return tokens.gather_tokens(plain(x), place, self.parallel)
        apart = plain(x).unflatten(place.dim, (place.before, place.count(plain(x).shape), place.after))
        return exchanged(apart, "gather", "slice", self, place.dim + 1).flatten(place.dim, place.dim + 2)

    def chunk(self, x: Tensor, dim: int) -> Tensor:
        return x.chunk(self.size, dim)[self._here.rank]

    def exchange(self, x: Tensor) -> list[Tensor]:
        """Return what all ranks bring."""
        self._brought[self._here.rank] = x
        self._barrier.wait(5)
        brought = list(self._brought)
        self._barrier.wait(5)
        return brought

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Return what the body gives on each rank.

        Raises:
            Exception: the first that a rank has raised.
        """
        self._barrier, self._brought = threading.Barrier(self.size), [torch.empty(0)] * self.size
        results: list[Any] = [None] * self.size
        errors: list[Exception] = []

        def rank(index: int) -> None:
            self._here.rank = index
            try:
                results[index] = body(index)
            except threading.BrokenBarrierError:
                pass  # another rank has raised
            except Exception as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=rank, args=(index,)) for index in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: str, backward: str, ranks: ThreadRanks, dim: int) -> Tensor:
        ctx.move = backward, ranks, dim
        return _moved(x, forward, ranks, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        backward, ranks, dim = ctx.move
        return _moved(grads[0], backward, ranks, dim), None, None, None, None


def _moved(x: Tensor, operation: str, ranks: ThreadRanks, dim: int) -> Tensor:
    if operation in ("identity", "slice"):
        return (x if operation == "identity" else ranks.chunk(x, dim)).clone()
    brought = ranks.exchange(x.detach())
    if operation == "gather":
        return torch.cat(brought, dim)
    total = torch.stack(brought).sum(0) if x.dtype != torch.bool else torch.stack(brought).any(0)
    return ranks.chunk(total, dim).clone() if operation == "reduce_scatter" else total


def exchanged(x: Tensor, forward: str, backward: str, group: ThreadRanks, dim: int = -1, to_dim: int = -1) -> Tensor:
    """Stand for `colossus.comm.conjugate.conjugate` among threads."""
    return _Exchanged.apply(x, forward, backward, group, dim)  # type: ignore[no-any-return]


def _attend(query: Tensor, key: Tensor, value: Tensor, ring: ThreadRanks, ulysses: Any, **options: Any) -> Tensor:
    """Stand for `colossus.sequence_parallel.attend.attend`, which sends tokens round a ring of processes."""
    place = Place(2)
    q, k, v = (tokens.gather_tokens(x, place, ring.parallel) for x in (query, key, value))
    causal = options["mask"].is_causal
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=options["scale"])
    # each rank has computed all of it: of the sum of the gradients of queries, which all bring, its own are its part
    return tokens.select_own_tokens(out, 2, place, ring.parallel)


@contextmanager
def thread_ranks(role: str, ring: bool = True) -> Iterator[ThreadRanks]:
    """Give two ranks that split a role."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "conjugate", exchanged)
        patch.setattr(redistribute, "conjugate", exchanged)
        patch.setattr("colossus.sharded_tensor.local_operands.conjugate", exchanged)
        patch.setattr(tokens, "attend", _attend)
        yield ThreadRanks(role, ring)
