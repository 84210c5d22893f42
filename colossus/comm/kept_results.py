"""Results that a forward under selective activation checkpointing keeps for its recomputation.

[Note: what selective checkpointing keeps]
The first pass keeps the result of each unit, and the recomputation takes it. A unit is an operator of torch (a product,
a convolution, attention), or all that a call of `kept` computes: a distributed product with the collectives of its
operands and of its result, say. Nothing inside a unit is kept, and its collectives take their fastest way.

A recomputation ends as soon as it has packed all tensors that backward needs
(`colossus.comm.autograd.save_for_backward`). It does not ask for the results of later units, so that the first pass
drops them when it ends: that of a block's last product, say. Where only another unit reads a product (an exchange of
its rows does), the recomputation needs its form and not its values: see `products_without_values`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map_only

from colossus.error_place import located_error

T = TypeVar("T")

_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks


class KeptResults(TorchDispatchMode):
    """The results of one forward: `first_pass` keeps them, `recomputation` takes them.

    Args:
        is_unit: whether an operator with these arguments is a unit.
    """

    def __init__(self, is_unit: Callable[[Any, tuple[Any, ...]], bool]) -> None:
        super().__init__()
        self._is_unit = is_unit
        #: name and result of each unit in their order; None where the recomputation has taken the result
        self._results: list[tuple[object, Any] | None] = []
        #: the number of units before the last tensor that is saved for backward, and that of repeated units
        self._num_needed = self._num_repeated = 0
        self._is_first = True
        self.is_paused, self.keeps_values = False, True

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """Run a forward and keep results, inside of the hooks of `torch.utils.checkpoint`."""
        pack, unpack = _top_hooks(True)

        def note_and_pack(tensor: Tensor) -> Any:
            self._num_needed = len(self._results)
            return pack(tensor)

        with saved_tensors_hooks(note_and_pack, unpack), self:
            yield
        del self._results[self._num_needed :]

    @contextmanager
    def recomputation(self) -> Iterator[None]:
        """Run the forward again, and take the results."""
        self._is_first, self._num_repeated = False, 0
        with self:
            yield

    def result_of(self, unit: object, compute: Callable[[], T], is_product: bool) -> T:
        """Return the result of a unit, a nest of tensors: ``compute()``, or in a recomputation the kept one.

        Args:
            unit: name of the unit, the same in both passes.
            compute: computes the result.
            is_product: see `products_without_values`.

        Raises:
            ValueError: the result has changed or was taken before, or the first pass ran another unit here.
        """
        if self._is_first or self._num_repeated >= len(self._results):  # a recomputation that does not stop early
            self.is_paused = True
            try:
                result = compute()
            finally:
                self.is_paused = False
            if self._is_first:
                has_values = self.keeps_values or not is_product
                self._results.append((unit, tree_map_only(Tensor, partial(_Kept, has_values=has_values), result)))
            return result
        entry, self._results[self._num_repeated] = self._results[self._num_repeated], None
        self._num_repeated += 1
        if entry is None:
            raise _taken_error(unit, "backward runs a second time")
        name, result = entry
        if name != unit:
            raise located_error(
                f"selective activation checkpointing: the recomputation of a forward comes to {unit} where the first "
                f"pass came to {name}, and has no result for it: use type 'full', or let the forward do the same each "
                f"time"
            )
        return tree_map_only(_Kept, lambda tensor: tensor.value(unit), result)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused or not self._is_unit(func, args):
            return func(*args, **kwargs)
        return self.result_of(func, lambda: func(*args, **kwargs), is_product=True)


class _Kept:
    """A tensor that must not change until it is used again; or only its form, with which `value` makes another one."""

    def __init__(self, tensor: Tensor, *, has_values: bool) -> None:
        form = tensor.shape, tensor.stride()
        self._make = partial(torch.empty_strided, *form, dtype=tensor.dtype, device=tensor.device)
        self._tensor = tensor.detach() if has_values else None
        self._version = tensor._version

    def value(self, unit: object) -> Tensor:
        """Return the tensor; ValueError if it has changed."""
        if self._tensor is None:
            return self._make()
        if self._tensor._version != self._version:
            raise _taken_error(unit, "it has changed")
        return self._tensor


def _taken_error(unit: object, why: str) -> Exception:
    return located_error(
        f"selective activation checkpointing keeps the result of {unit} for one backward, and nothing may change it in "
        f"place ({why}): use nn.ReLU() behind a linear, not nn.ReLU(inplace=True). nn.LSTM, nn.GRU and nn.RNN change "
        f"it themselves, and retain_graph=True runs backward twice: both work with type 'full'"
    )


def kept(unit: str, compute: Callable[[], T], *, is_product: bool = False) -> T:
    """Return ``compute()``; a recomputation under selective activation checkpointing returns the first pass's result.

    Args:
        unit: name of the unit, for errors.
        compute: computes a tensor, or a nest of tensors that it owns, without autograd: call `kept` in the forward of
            an autograd function.
        is_product: see `products_without_values`.
    """
    results = _active_results()
    if not results:
        return compute()
    return results[-1].result_of(unit, lambda: kept(unit, compute, is_product=is_product), is_product)


def products_without_values(condition: bool) -> AbstractContextManager[None]:
    """Keep only the form of products inside, under a condition: another unit reads them, and no backward does.

    In a recomputation they have any values. Operators of torch count as products.
    """
    results = _active_results() if condition else []
    return _without_values(results) if results else nullcontext()  # a compiler traces the latter


@contextmanager
def _without_values(results: Sequence[KeptResults]) -> Iterator[None]:
    before = [(one, one.keeps_values) for one in results]
    for one in results:
        one.keeps_values = False
    try:
        yield
    finally:
        for one, keeps_values in before:
            one.keeps_values = keeps_values


def keeps_results() -> bool:
    """Return whether a forward, or its recomputation, runs under selective activation checkpointing."""
    return bool(_active_results())


def _active_results() -> list[KeptResults]:
    """Return the results of the checkpointed forwards that are running, the innermost last, outside of their units."""
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        return []
    stack = _get_current_dispatch_mode_stack()
    return [mode for mode in stack if isinstance(mode, KeptResults) and not mode.is_paused]


class KeptReads:
    """The values that one forward has read from its device, in order; its recomputation reads them from here.

    A read makes the host wait until the device has come to it, and the device then waits for the host.
    """

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._next = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the forward, for the first time or again."""
        self._next = 0
        _running.stack.append(self)
        try:
            yield
        finally:
            _running.stack.remove(self)

    def value_of(self, read: Callable[[], T]) -> T:
        """Return ``read()``; in a recomputation, what it returned in the first pass."""
        if self._next == len(self._values):
            self._values.append(read())
        self._next += 1
        value: T = self._values[self._next - 1]
        return value


class _Running(threading.local):
    """The forwards of this thread whose reads are kept, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[KeptReads] = []


_running = _Running()


def read_once(read: Callable[[], T]) -> T:
    """Return ``read()``, which reads from a device; a recomputation returns what the first pass has read.

    Under nested checkpointing the first pass of an inner forward may belong to a recomputation of the outer one.
    """
    for reads in _running.stack:
        read = partial(reads.value_of, read)
    return read()
