"""One operation of a constructor, recorded: its arguments as they were, to be run later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True)
class TensorRef:
    """A meta tensor as it was when an operation met it (``t_()`` and the like change it later)."""

    storage: torch.UntypedStorage
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    is_conj: bool
    is_neg: bool

    @property
    def key(self) -> int:
        return self.storage._cdata


class RecordedOp:
    """One operation with its arguments as they were; meta tensors among them are `TensorRef`."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, tree_map(_as_it_is, args), tree_map(_as_it_is, kwargs)
        self.outputs: list[TensorRef] = []
        self.index = 0
        self.has_run = False

    def storages(self) -> list[torch.UntypedStorage]:
        leaves = (*tree_leaves((self.args, self.kwargs)), *self.outputs)
        refs = [leaf.storage for leaf in leaves if isinstance(leaf, TensorRef)]
        return refs + [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]

    def touched(self) -> list[int]:
        """Of the storages that it touches, which connect it with other operations."""
        return [storage._cdata for storage in self.storages()]

    def run(self, to_real: Callable[[Any], Any], storages: dict[int, torch.UntypedStorage]) -> None:
        args, kwargs = tree_map(to_real, (self.args, self.kwargs))
        results = [leaf for leaf in tree_leaves(self.func(*args, **kwargs)) if isinstance(leaf, Tensor)]
        for ref, real in zip(self.outputs, results, strict=True):
            if ref.key not in storages:
                storages[ref.key] = _storage_like(real, ref)
        self.has_run = True
        self.args, self.kwargs = (), {}


def _storage_like(real: Tensor, ref: TensorRef) -> torch.UntypedStorage:
    """A storage in which ``ref`` is ``real``, whatever strides the operation chose on this device."""
    if (real.storage_offset(), real.size(), real.stride()) == (ref.offset, ref.size, ref.stride):
        return real.untyped_storage()
    span = ref.offset + 1 + sum((size - 1) * step for size, step in zip(ref.size, ref.stride, strict=True))
    buffer = torch.empty(span if ref.size.numel() else 0, dtype=ref.dtype)
    buffer.as_strided(ref.size, ref.stride, ref.offset).copy_(real)
    return buffer.untyped_storage()


def as_ref(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_meta:
        return leaf
    geometry = int(leaf.storage_offset()), leaf.size(), leaf.stride()
    return TensorRef(leaf.untyped_storage(), leaf.dtype, *geometry, leaf.is_conj(), leaf.is_neg())


def _as_it_is(leaf: Any) -> Any:
    """An argument that stays what it is now. Of memory shared with numpy a copy: writes to it are not seen here."""
    if isinstance(leaf, Tensor) and not leaf.is_meta:
        return leaf if leaf.untyped_storage().resizable() else leaf.clone()
    return as_ref(leaf)
