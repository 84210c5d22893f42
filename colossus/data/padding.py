"""Padding of samples and microbatches: 0 in a model's input, and what losses leave out everywhere else."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from colossus.data.batch import Batch, batch_size_of, has_one_per_sample, map_batch
from colossus.data.model_input import padding_values
from colossus.nest import map_leaves, tensors


def with_size(batch: Batch, old: int, new: int, dim: int, fixed: Set[str] = frozenset()) -> Batch:
    """Return a nest with ``new`` entries in a dim of all tensors that have ``old``; further ones are padding.

    Padding in an entry ``documents`` is a document of its own, behind the others.

    Args:
        fixed: paths of tensors that stay as they are.
    """
    values = padding_values(batch)
    paths = (path for path, _ in tensors(batch))

    def resized(x: Tensor) -> Tensor:
        value, path = next(values), next(paths)
        if x.dim() <= dim or x.shape[dim] != old or old == new or path in fixed:
            return x
        if new < old:
            return x.narrow(dim, 0, new)
        shape = [*x.shape[:dim], new - old, *x.shape[dim + 1 :]]
        if path.endswith("['documents']") and dim == x.dim() - 1 and old:
            return torch.cat((x, (x.amax(dim, keepdim=True) + 1).expand(shape)), dim)
        return torch.cat((x, x.new_full(shape, value)), dim)

    return map_batch(resized, batch)


def with_rows(batch: Batch, rows: int) -> Batch:
    """Return a batch with ``rows`` samples; further ones are padding, None in lists of one entry for each sample."""
    size = batch_size_of(batch)
    if size == rows:
        return batch

    def extended(leaf: Any) -> Any:
        return leaf + [None] * (rows - size) if isinstance(leaf, list) else leaf

    lists_extended = map_leaves(extended, batch, is_leaf=lambda value: has_one_per_sample(value, size))
    return with_size(lists_extended, size, rows, 0)
