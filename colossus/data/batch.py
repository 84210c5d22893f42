"""Batches: any nest of dicts, tuples and lists of tensors whose dim 0 counts the samples.

A batch may also have lists of other things with one entry per sample (file names), which are split as the tensors are.
Tensors without dims, numbers and strings belong to the whole batch and are part of every slice. numpy arrays count as
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from colossus.nest import leaves, map_leaves
from colossus.registry import nearest

Batch = Any


class Microbatches(NamedTuple):
    """A data rank's batch of a step, in microbatches of different shapes (`colossus.data.token_budget`).

    All data ranks have equally many.

    Attributes:
        batches: the microbatches.
        samples: for each the numbers of its samples in the global batch, int64 [b]; -1: padding.
    """

    batches: Sequence[Batch]
    samples: Sequence[torch.Tensor]


def map_batch(fn: Callable[[torch.Tensor], Any], batch: Batch) -> Batch:
    """Return the same nest with ``fn`` of each tensor; mappings become dicts, named tuples keep their class."""
    return map_leaves(lambda leaf: fn(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)


def to_tensors(batch: Batch, device: torch.device | None = None) -> Batch:
    """Return the batch with numpy arrays of numbers as tensors, and all tensors on ``device``, if one is set."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            leaf = torch.from_numpy(leaf)
        if device is not None and isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=True)
        return leaf

    return map_leaves(convert, batch, is_leaf=_has_nothing_to_convert)


#: types of plain entries of lists, which are not converted one by one: that would take as long as reading them
_PLAIN = frozenset((str, int, float, bool, bytes, type(None)))


def _has_nothing_to_convert(value: Any) -> bool:
    return type(value) is list and _PLAIN.issuperset(map(type, value))


def batch_size_of(batch: Batch) -> int:
    """Return the number of samples: size of dim 0, the same in all tensors.

    Raises:
        ValueError: if no tensor of the batch has a dim 0, or tensors disagree; each is named with its shape.
    """
    shapes = [(path, tuple(leaf.shape)) for path, leaf in _arrays(batch)]
    if not shapes:
        raise ValueError(f"cannot tell the batch size: no tensor with a dim 0 in a batch of {type(batch).__name__}")
    sizes = {shape[0] for _, shape in shapes}
    if len(sizes) > 1:
        listing = ", ".join(f"{path} {list(shape)}" for path, shape in shapes)
        raise ValueError(
            f"cannot tell the batch size: tensors differ in dim 0, that of the samples ({listing}); "
            f"train.batch_dims says which dim of an entry is that of the samples"
        )
    return sizes.pop()


def slice_batch(batch: Batch, start: int, stop: int) -> Batch:
    """Return samples ``start`` to ``stop`` as views."""
    return _slice(batch, slice(start, stop), batch_size_of(batch))


def split_microbatches(batch: Batch, n: int, *, interleaved: bool = False) -> list[Batch]:
    """Return ``n`` microbatches of equal size, in order, as views.

    Args:
        batch: this rank's batch, ``b`` samples.
        n: number of microbatches.
        interleaved: whether the m-th has samples m, m + n, m + 2 n and so on, copied. The microbatches of all data
            ranks together then have the same samples for any number of data ranks.

    Returns:
        ``n`` batches of ``b / n`` samples.

    Raises:
        ValueError: if ``b`` does not divide by ``n``.
    """
    size = batch_size_of(batch)
    if n < 1 or size % n or not size:
        raise ValueError(
            f"a batch of {size} samples per data rank does not divide into {n} microbatches; change "
            f"train.global_batch_size or schedule.microbatches"
        )
    if n == 1:
        return [batch]
    if interleaved:  # contiguous, for a model that views samples and tokens as one dim
        return [map_batch(torch.Tensor.contiguous, _slice(batch, slice(m, None, n), size)) for m in range(n)]
    step = size // n
    return [_slice(batch, slice(start, start + step), size) for start in range(0, size, step)]


def repeat_batch(batch: Batch, times: int) -> Batch:
    """Return all samples ``times`` times one after the other: ``b * times`` samples."""
    if times == 1:
        return batch
    size = batch_size_of(batch)

    def repeat(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.cat([leaf] * times) if leaf.dim() else leaf
        if isinstance(leaf, np.ndarray):
            return np.concatenate([leaf] * times) if leaf.ndim else leaf
        return leaf * times if isinstance(leaf, list) else leaf

    return map_leaves(repeat, batch, is_leaf=lambda value: has_one_per_sample(value, size))


def shard_of_batch(batch: Batch, index: int, count: int) -> Batch:
    """Return shard ``index`` of ``count`` equal shards of the samples, as views.

    Returns:
        ``b / count`` samples of a batch of ``b``.

    Raises:
        ValueError: if the samples do not divide by ``count``.
    """
    if count == 1:
        return batch
    size = batch_size_of(batch)
    if size % count:
        raise ValueError(
            f"{size} samples do not divide over the {count} ranks that split the batch of a model; change "
            f"train.global_batch_size, schedule.microbatches or parallel.tensor"
        )
    rows = size // count
    return _slice(batch, slice(index * rows, (index + 1) * rows), size)


@dataclass(frozen=True)
class WholeEntry:
    """An entry of a batch without samples: it is part of every slice."""

    value: Any


@dataclass(frozen=True)
class SampleDims:
    """The dims of samples in entries of a batch, if they are not dim 0 (``train.batch_dims``).

    Args:
        dims: key of an entry -> its dim of samples, after which the dim of tokens follows; None: it has no samples.
    """

    dims: Mapping[str, int | None] = field(default_factory=dict)

    def first(self, batch: Batch) -> Batch:
        """Return the batch with the samples in dim 0 of each entry, as views, which the functions here need.

        Raises:
            ValueError: if an entry has no such dim, or the batch has no such key but a similar one.
        """
        keys = _keys_of(batch) if self.dims else set[str]()
        for missing in self.dims.keys() - keys:
            if close := nearest(missing, sorted(keys - self.dims.keys())):
                raise ValueError(f"train.batch_dims: a batch has no entry {missing!r}; did you mean {close!r}?")
        return self._mapped(batch, self._with_samples_first)

    def restored(self, batch: Batch) -> Batch:
        """Return the batch, or a part of its samples, with the dims that it had before `first`."""
        return self._mapped(batch, self._with_own_dims)

    def cut(self, batch: Batch, start: int, stop: int) -> Batch:
        """Return the samples ``start`` to ``stop`` of a batch, with its own dims."""
        return self.restored(slice_batch(self.first(batch), start, stop))

    def token_dim(self, key: str) -> int:
        """Return the dim after that of the samples."""
        return (self.dims.get(key) or 0) + 1

    def _mapped(self, batch: Batch, change: Callable[[str, Any], Any]) -> Batch:
        if not self.dims:
            return batch
        if isinstance(batch, Mapping):
            return {
                key: change(key, value) if key in self.dims else self._mapped(value, change)
                for key, value in batch.items()
            }
        if isinstance(batch, list | tuple):
            parts = [self._mapped(value, change) for value in batch]
            return parts if isinstance(batch, list) else type(batch)(*parts) if hasattr(batch, "_fields") else (*parts,)
        return batch

    def _with_samples_first(self, key: str, entry: Any) -> Any:
        dim = self.dims[key]
        if dim is None:
            return WholeEntry(torch.as_tensor(entry) if isinstance(entry, np.ndarray) else entry)
        if not isinstance(entry, torch.Tensor | np.ndarray) or entry.ndim <= dim:
            what = f"shape {list(entry.shape)}" if hasattr(entry, "shape") else f"type {type(entry).__name__}"
            raise ValueError(f"train.batch_dims: {key!r} of a batch has no dim {dim}: it is of {what}")
        return torch.as_tensor(entry).permute(_samples_first(dim, entry.ndim))

    def _with_own_dims(self, key: str, entry: Any) -> Any:
        if isinstance(entry, WholeEntry):
            return entry.value
        order = _samples_first(self.dims[key] or 0, entry.ndim)
        return entry.permute([order.index(dim) for dim in range(entry.ndim)])


def _keys_of(batch: Batch) -> set[str]:
    """Return the keys of all dicts in a batch."""
    if isinstance(batch, Mapping):
        return {str(key) for key in batch}.union(*map(_keys_of, batch.values()))
    return set[str]().union(*map(_keys_of, batch)) if isinstance(batch, list | tuple) else set()


def _samples_first(dim: int, ndim: int) -> list[int]:
    """Return the dim of the samples, that of the tokens after it, and the others."""
    return [*range(dim, min(dim + 2, ndim)), *range(dim), *range(dim + 2, ndim)]


def has_one_per_sample(value: Any, size: int) -> bool:
    """Return whether a value is a list of things that are no tensors, with one entry for each of ``size`` samples."""
    return isinstance(value, list) and len(value) == size and next(_arrays(value), None) is None


def _slice(batch: Batch, part: slice, size: int) -> Batch:
    def cut(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor | np.ndarray):
            return leaf[part] if leaf.ndim else leaf
        return leaf[part] if isinstance(leaf, list) else leaf

    return map_leaves(cut, batch, is_leaf=lambda value: has_one_per_sample(value, size))


def _arrays(batch: Batch) -> Iterator[tuple[str, torch.Tensor | np.ndarray]]:
    """Yield every tensor that has a dim 0, with its path."""
    return (
        (path, leaf)
        for path, leaf in leaves(batch, "batch")
        if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim
    )
