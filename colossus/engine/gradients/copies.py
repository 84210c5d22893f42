"""Shards of which neighbouring ranks hold copies (key/value heads that are fewer than the ranks), with one gradient."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.engine.gradients.buckets import LocalSum, sum_of_all
from colossus.layout.parameter import LogicalShard, spec_of
from colossus.tensor_parallel.dtypes import gradient_dtype


class CopiedGradients:
    """Sums the gradients of copies of a shard over the ranks that hold them, after all other sums.

    Each copy was used by its rank alone: by that rank's query heads. One all-reduce per group of ranks and dtype.
    """

    def __init__(self, params: Iterable[nn.Parameter], context: ParallelContext) -> None:
        self._by_group: dict[tuple[str, tuple[int, ...], torch.dtype], list[tuple[nn.Parameter, LogicalShard]]] = {}
        self._context = context
        self._own_sums: list[Tensor] = []
        for param in params:
            for shard in spec_of(param).shards if param.requires_grad else ():
                for axis, count in shard.layout.copies:
                    first = context.coordinates[axis] // count * count
                    key = axis, tuple(range(first, first + count)), gradient_dtype(param)
                    self._by_group.setdefault(key, []).append((param, shard))

    def sum(self) -> None:
        """Collective over the ranks that share shards, once their own gradients are complete."""
        self._own_sums = [
            _sum(held, self._context.subgroup(axis, indices)) for (axis, indices, _), held in self._by_group.items()
        ]

    def local_sums(self) -> list[LocalSum]:
        """Of what this rank put into the last sum: of gradients that were summed over other axes already."""
        names = [tuple(spec_of(param).name for param, _ in held) for held in self._by_group.values()]
        return list(zip(names, self._own_sums, strict=False))


def _sum(held: list[tuple[nn.Parameter, LogicalShard]], group: AxisGroup) -> Tensor:
    """Sum over the group, in place.

    A parameter that none of the ranks has used keeps ``grad = None``: one flag each goes with the gradients.

    Returns:
        The sum of this rank's own numbers.
    """
    dtype = gradient_dtype(held[0][0])
    flags = [param.new_full((1,), float(param.grad is not None), dtype=dtype) for param, _ in held]
    flat = torch.cat([*(_rows(param.grad, param, shard).flatten() for param, shard in held), *flags])
    own_sum = sum_of_all(flat)
    total = collectives.all_reduce(flat, group, owned=True).wait()
    is_here = [param.grad is not None for param, _ in held]
    any_used = is_here if all(is_here) else total[-len(held) :].tolist()  # which an accelerator is waited for
    start = 0
    for (param, shard), used in zip(held, any_used, strict=True):
        stop = start + _rows(param, param, shard).numel()
        if used and param.grad is None:
            param.grad = torch.zeros_like(param, dtype=gradient_dtype(param))
        if param.grad is not None:
            rows = _rows(param.grad, param, shard)
            rows.copy_(total[start:stop].view_as(rows))
        start = stop
    return own_sum


def _rows(buffer: Tensor | None, param: nn.Parameter, shard: LogicalShard) -> Tensor:
    """Of a parameter or its gradient the rows of a shard; zeros where there is no gradient."""
    rows = slice(*shard.rows)
    return torch.zeros_like(param[rows], dtype=gradient_dtype(param)) if buffer is None else buffer.detach()[rows]
