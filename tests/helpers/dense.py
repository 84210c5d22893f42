"""What movements and layouts mean on whole tensors: the reference for comm and layout, in one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from colossus.context.grid import RankGrid
from colossus.layout.layout import Layout


def dense(operation: str, parts: Sequence[Tensor], dim: int, to_dim: int) -> list[Tensor]:
    """What the operation gives on every rank of a group, from what all of its ranks hold."""
    n = len(parts)
    if operation == "identity":
        return list(parts)
    if operation == "sum":
        return [sum(parts[1:], parts[0])] * n
    if operation == "max":
        return [torch.stack(list(parts)).amax(0)] * n
    if operation == "gather":
        return [torch.cat(list(parts), dim)] * n
    if operation == "reduce_scatter":
        return list(sum(parts[1:], parts[0]).chunk(n, dim))
    if operation == "slice":
        return [part.chunk(n, dim)[rank] for rank, part in enumerate(parts)]
    if operation == "pad":
        zeros = [torch.zeros_like(part) for part in parts]
        return [torch.cat([*zeros[:rank], part, *zeros[rank + 1 :]], dim) for rank, part in enumerate(parts)]
    assert operation == "all_to_all"
    pieces = [part.chunk(n, to_dim) for part in parts]
    return [torch.cat([piece[rank] for piece in pieces], dim) for rank in range(n)]


def points(sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Coordinates of all ranks, in rank order."""
    for point in itertools.product(*map(range, sizes.values())):
        yield dict(zip(sizes, point, strict=True))


def spread(whole: Tensor, layout: Layout, sizes: Mapping[str, int], generator: torch.Generator) -> list[Tensor]:
    """What each rank holds of a tensor in a layout: its box; over partial axes random parts that add up."""
    partial = {axis: sizes[axis] for axis in layout.partial}
    count = 1
    for size in partial.values():
        count *= size
    terms = [torch.randn(whole.shape, generator=generator, dtype=whole.dtype) for _ in range(count - 1)]
    terms.append(whole - sum(terms, torch.zeros_like(whole)))
    out = []
    for at in points(sizes):
        index = 0
        for axis, size in partial.items():
            index = index * size + at[axis]
        box = layout.box(tuple(whole.shape), sizes, at)
        out.append(terms[index][tuple(slice(*span) for span in box)])
    return out


def collect(parts: Sequence[Tensor], layout: Layout, sizes: Mapping[str, int], shape: Sequence[int]) -> Tensor:
    """The whole tensor from what all ranks hold; fails when ranks that should agree do not."""
    whole = torch.zeros(tuple(shape), dtype=parts[0].dtype)
    held: dict[tuple[int, ...], Tensor] = {}
    telling = [axis for axis in sizes if axis in layout.shard_axes or axis in layout.partial]
    for at, part in zip(points(sizes), parts, strict=True):
        box = tuple(slice(*span) for span in layout.box(tuple(shape), sizes, at))
        assert part.shape == whole[box].shape, (part.shape, layout, at)
        key = tuple(at[axis] for axis in telling)
        if key in held:
            torch.testing.assert_close(part, held[key], rtol=0, atol=1e-9, msg=f"replicas differ in {layout}")
        else:
            held[key] = part
            whole[box] += part
    return whole


def gradient_layout(layout: Layout) -> Layout:
    """How the gradient of a tensor so laid out is held: every part of a partial sum has the whole gradient."""
    return Layout(layout.dims, partial=layout.grad_partial)


def run_on_all(
    operation: str, parts: Sequence[Tensor], grid: RankGrid, axes: tuple[str, ...], dim: int, to_dim: int
) -> list[Tensor]:
    """One movement over ``axes`` on all ranks of a grid."""
    out: list[Tensor | None] = [None] * grid.world_size
    for rank in range(grid.world_size):
        group = grid.group(rank, axes)
        if group[0] == rank:
            made = dense(operation, [parts[member] for member in group], dim, to_dim)
            for member, part in zip(group, made, strict=True):
                out[member] = part
    return [part for part in out if part is not None]
