"""The collectives that turn one layout into another, each with its conjugate in backward. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from colossus.error_place import located_error
from colossus.layout.layout import Layout


@dataclass(frozen=True)
class Move:
    """A collective and its conjugate in backward.

    Attributes:
        forward, backward: names of `colossus.comm.conjugate`.
        axes: axes over which the ranks communicate.
        dim: dim that is gathered, sliced, reduce-scattered or, by an all-to-all, split no more; -1 for sums.
        to_dim: dim that an all-to-all splits; else -1.
    """

    forward: str
    backward: str
    axes: tuple[str, ...]
    dim: int = -1
    to_dim: int = -1

    def __str__(self) -> str:
        where = f" dim {self.dim}" + (f" to {self.to_dim}" if self.to_dim >= 0 else "") if self.dim >= 0 else ""
        return f"{self.forward}/{self.backward} over {','.join(self.axes)}{where}"


def _common_prefix(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


@lru_cache(maxsize=4096)
def moves(source: Layout, target: Layout) -> tuple[Move, ...]:
    """Return the moves from ``source`` to ``target``: axes leave dims first, and shard dims last.

    Raises:
        ValueError: the number of dims differs, or the change has no meaning: a value whose gradient is partial cannot
            become one whose gradient is complete without a reduction, and a value cannot become a partial sum.
    """
    if len(source.dims) != len(target.dims):
        raise located_error(f"cannot move from {source} to {target}: the number of dims differs")
    dims = [list(axes) for axes in source.dims]
    partial, grad_partial = set(source.partial), set(source.grad_partial)
    out: list[Move] = []

    target_dim = {axis: index for index, axes in enumerate(target.dims) for axis in axes}

    def exchange() -> None:
        """Add an all-to-all over each axis that is innermost in its dim and next in order in its target dim."""
        for index, axes in enumerate(dims):
            while len(axes) > _common_prefix(tuple(axes), target.dims[index]):
                axis, to_dim = axes[-1], target_dim.get(axes[-1])
                if to_dim is None or to_dim == index:
                    break
                if target.dims[to_dim][: len(dims[to_dim]) + 1] != (*dims[to_dim], axis):
                    break
                out.append(Move("all_to_all", "all_to_all", (axis,), index, to_dim))
                axes.pop()
                dims[to_dim].append(axis)

    def gather(leaving: Callable[[str], bool]) -> None:
        """Add a gather over axes that the target does not shard, or not in this order."""
        for index, axes in enumerate(dims):
            keep = _common_prefix(tuple(axes), target.dims[index])
            while len(axes) > keep and leaving(axes[-1]):
                complete = axes[-1] not in target.grad_partial
                run = [axes.pop()]
                while len(axes) > keep and leaving(axes[-1]) and (axes[-1] not in target.grad_partial) is complete:
                    run.insert(0, axes.pop())
                out.append(Move("gather", "slice" if complete else "reduce_scatter", tuple(run), index))
                if not complete:
                    grad_partial.update(run)

    # 1. exchange where possible, gather axes that may block another exchange, exchange again, gather the rest
    exchange()
    gather(lambda axis: axis not in target_dim)
    exchange()
    gather(lambda axis: True)
    # 2. reduce partial sums, directly into a shard where the target has one
    for index, axes in enumerate(dims):
        for axis in target.dims[index][len(axes) :]:
            if axis not in partial:
                break
            out.append(Move("reduce_scatter", "gather", (axis,), index))
            partial.discard(axis)
            axes.append(axis)
    rest = tuple(axis for axis in source.partial if axis in partial and axis not in target.partial)
    for kind in ("identity", "sum"):
        run_axes = tuple(axis for axis in rest if (axis in target.grad_partial) is (kind == "sum"))
        if run_axes:
            out.append(Move("sum", kind, run_axes))
            partial.difference_update(run_axes)
            if kind == "sum":
                grad_partial.update(run_axes)
    # 3. shard replicated dims
    for index, axes in enumerate(dims):
        todo = target.dims[index][len(axes) :]
        for axis in todo:
            assert axis not in partial
            out.append(Move("slice", "pad" if axis in grad_partial else "gather", (axis,), index))
            grad_partial.discard(axis)
            axes.append(axis)
    # 4. from here on the gradient is partial
    fresh = tuple(axis for axis in target.grad_partial if axis not in grad_partial)
    if fresh:
        out.append(Move("identity", "sum", fresh))
        grad_partial.update(fresh)
    if partial != set(target.partial):
        new = ", ".join(axis for axis in target.partial if axis not in partial)
        raise located_error(f"cannot move from {source} to {target}: a value cannot become a partial sum over {new}")
    if grad_partial != set(target.grad_partial):
        raise located_error(f"cannot move from {source} to {target}: a partial gradient must be reduced first")
    return tuple(out)
