"""Fake tensors (sizes, dtypes and devices without values) that count the bytes that are alive."""

from __future__ import annotations

import inspect
import types as python_types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._pytree import tree_leaves

from colossus.layers import deferred_wgrad
from colossus.sequence_parallel import ring_attention

aten = torch.ops.aten
_DEVICE_OF = torch.ops.prim.device.default
#: without the wrapper that enters and leaves torch._dynamo at each operator
_DISPATCH = inspect.unwrap(FakeTensorMode.__torch_dispatch__)
#: fused updates: they only work in place, and some of them do not support fake tensors
_UPDATES = tuple(
    getattr(getattr(aten, name), overload)
    for name in ("_fused_adamw_", "_fused_adam_", "_fused_sgd_", "_fused_adagrad_")
    for overload in getattr(aten, name).overloads()
)
#: frequent operators with meta kernels in C++, which say all of a result but its device, the first argument's
_INFERRED_BY_META = frozenset(
    getattr(getattr(aten, name), overload)
    for name, overload in (
        ("view", "default"), ("t", "default"), ("transpose", "int"), ("permute", "default"), ("detach", "default"),
        ("alias", "default"), ("_unsafe_view", "default"), ("unsqueeze", "default"), ("expand", "default"),
        ("select", "int"), ("slice", "Tensor"), ("mm", "default"), ("bmm", "default"), ("clone", "default"),
        ("_to_copy", "default"), ("new_empty", "default"), ("sum", "dim_IntList"),
    )
)  # fmt: skip


class CountedFakeTensors(FakeTensorMode):
    """A mode of fake tensors that counts the bytes of living storages, each once from its creation until it is freed.

    It is one mode, not two: under a second mode our collectives would choose the path of a recorded graph. A number
    that is read from a fake tensor is 1.

    Attributes:
        live: bytes of the living storages, without those that are set aside.
        peak: the most of these bytes since `mark`.
        aside: bytes of the living storages that are set aside.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.live = self.peak = self.aside = 0
        #: called with each operator, its positional and keyword arguments, and its result
        self.observer: Callable[[Any, Any, Any, Any], None] | None = None
        #: bytes of each living storage, by its key, and the keys of those that are set aside
        self._sizes: dict[int, int] = {}
        self._aside: set[int] = set()
        #: nesting of operators: those that run inside of another, to infer its shapes, allocate nothing
        self._depth = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: else torch wraps `__torch_dispatch__`, and imports torch._dynamo at the first operator."""
        return False

    def mark(self) -> int:
        """Start a new peak, and return the living bytes."""
        self.peak = self.live
        return self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor):  # first, as it is the most frequent
            return args[0].fake_device
        kwargs = kwargs or {}
        if func in _UPDATES:
            if self.observer is not None:
                self.observer(func, args, kwargs, None)
            return None
        if func is aten._local_scalar_dense.default:
            return False if args[0].dtype is torch.bool else 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops._c10d_functional.wait_tensor.default:  # returns its argument
            return args[0]
        if func is ring_attention.RING_ATTENTION:  # torch would call the operator with meta tensors
            with self:
                return ring_attention._forward(*args, **kwargs)
        self._depth += 1
        try:
            with torch._C.DisableTorchFunction():
                if func in _INFERRED_BY_META and _have_no_values(args) and "device" not in kwargs:
                    out = self._infer(func, args, kwargs)
                else:
                    out = _DISPATCH(self, func, types, args, kwargs)
        finally:
            self._depth -= 1
        if self.observer is not None and not self._depth:
            self.observer(func, args, kwargs, out)
        for leaf in tree_leaves(out) if not self._depth else ():
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self._count(leaf.untyped_storage())
        return out

    def _infer(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        with in_kernel_invocation_manager(self):
            out = func(*args, **kwargs)
        return FakeTensor(self, out, args[0].fake_device)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self._add(storage.nbytes())
        weakref.finalize(storage, self._forget, key)

    def _add(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        size = self._sizes.pop(key)
        if key in self._aside:
            self._aside.discard(key)
            self.aside -= size
        else:
            self.live -= size

    def set_aside(self, tensor: Tensor) -> None:
        """Count the storage of a living tensor in `aside` from now on, not in `live`."""
        key = tensor.untyped_storage()._cdata
        if key in self._sizes and key not in self._aside:
            self._aside.add(key)
            self.live -= self._sizes[key]
            self.aside += self._sizes[key]

    def uncounted(self, nbytes: int) -> Tensor:
        """Return a new tensor of bytes that is in no count."""
        peak = self.peak
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        self.note_resize(tensor.untyped_storage(), 0)
        self.peak = peak
        return tensor

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Call no observer inside the context."""
        observer, self.observer = self.observer, None
        try:
            yield
        finally:
            self.observer = observer

    def note_resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Count the new size of a storage that was resized: ZeRO frees storages so, and allocates them again."""
        key = storage._cdata
        if key in self._sizes:
            self._add(size - self._sizes[key])
            self._sizes[key] = size


def _have_no_values(args: Sequence[Any]) -> bool:
    """Return whether the first argument is a fake tensor, and all tensors are fake ones whose values nobody knows."""
    return isinstance(args[0], FakeTensor) and all(
        arg.constant is None if isinstance(arg, FakeTensor) else not isinstance(arg, Tensor) for arg in args
    )


@contextmanager
def counted_fake_tensors() -> Iterator[CountedFakeTensors]:
    """Make new tensors fake inside the context. They can become tensors of our own types."""
    mode, resize = CountedFakeTensors(), torch.UntypedStorage.resize_

    def resize_and_note(self: torch.UntypedStorage, size: int) -> Any:
        resized = resize(self, size)
        mode.note_resize(self, self.nbytes())
        return resized

    with (
        patch.object(FakeTensor, "as_subclass", as_subclass),
        patch.object(FakeTensor, "__setattr__", set_attribute, create=True),
        patch.object(FakeTensor, "data_ptr", _identity, create=True),
        patch.object(torch.UntypedStorage, "resize_", resize_and_note),
        patch.object(deferred_wgrad, "PLAIN", (Tensor, FakeTensor)),
        mode,
    ):
        yield mode


def as_subclass(self: FakeTensor, cls: type[Tensor]) -> Tensor:
    """Return a fake tensor as a fake tensor of another type."""
    with torch._C.DisableTorchFunctionSubclass():
        view = self.view_as(self)
    view.__class__ = cls
    return view


def set_attribute(self: FakeTensor, name: str, value: Any) -> None:
    object.__setattr__(self, name, _fake_type(value) if name == "__class__" else value)


def _identity(self: FakeTensor) -> int:
    """Return a number that identifies a fake tensor's memory, in place of its address."""
    return int(self.untyped_storage()._cdata) + int(self.storage_offset()) * self.itemsize


@lru_cache(maxsize=64)
def _fake_type(kind: type[Tensor]) -> type[Tensor]:
    """Return the type of fake tensors that behave as one of our own types, such as `ShardedTensor`."""
    if kind in (Tensor, torch.nn.Parameter):
        return FakeTensor
    if issubclass(kind, FakeTensor):
        return kind
    return python_types.new_class(f"Fake{kind.__name__}", (kind, FakeTensor))
