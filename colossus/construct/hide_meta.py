"""A mode in which a constructor sees tensors on meta as tensors on the CPU, while a model is built."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map

from colossus.construct.init_trace import CPU, META, InitTrace

#: a property -> its value for a tensor on meta
_PROPERTIES: dict[Any, Any] = {
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    Tensor.device.__get__: CPU,
}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
#: functions that read the memory of a tensor without an operator
_READERS = {
    Tensor.numpy,
    Tensor.__array__,
    Tensor.tolist,
    Tensor.__format__,
    Tensor.data_ptr,
    Tensor.untyped_storage,  # pickle reads it
}
#: functions that make a tensor from Python numbers
_OF_NUMBERS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor, Tensor.new}


class HideMeta(TorchFunctionMode):
    """A mode that hides from a constructor that its tensors are on meta.

    Without it the constructor would copy numbers there, where they are lost, and some of `torch.nn.init` would do
    nothing. Where the trace is suspended nothing is hidden, and neither are tensors that the constructor itself has
    requested on meta: ``from_pretrained`` gives values to tensors that it sees there.
    """

    def __init__(self, trace: InitTrace) -> None:
        super().__init__()
        self._trace = trace
        #: storages that the constructor requested on meta, by key
        self._asked: dict[int, torch.UntypedStorage] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(mode is self._trace for mode in _get_current_dispatch_mode_stack()):
            return func(*args, **kwargs)
        out = self._call(func, args, kwargs)
        if isinstance(out, Tensor) and any(_says_meta(argument) for argument in (*args, *kwargs.values())):
            storage = out.untyped_storage()
            self._asked[storage._cdata] = storage
        return out

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _OF_NUMBERS:
            return self._of_numbers(func, args, kwargs)
        if args and isinstance(args[0], Tensor):
            if func == _SET_DATA:
                return func(args[0], self._trace.beside(args[0], args[1]))
            if args[0].is_meta:
                return self._of_tensor(func, args, kwargs)
        return func(*args, **kwargs)

    def _of_tensor(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function with a tensor on meta as its first argument."""
        if func in _PROPERTIES:
            is_asked = args[0].untyped_storage()._cdata in self._asked
            return func(*args, **kwargs) if is_asked else _PROPERTIES[func]
        if func in _READERS:
            return func(self._trace.value(args[0]), *args[1:], **kwargs)
        if func is Tensor.cpu:
            return Tensor.to(args[0], META, *args[1:], **kwargs)
        if func is Tensor.to:  # no copy where the tensor seems to be on that device
            if len(args) > 1 and isinstance(args[1], Tensor):
                args = (args[0], args[1].device, args[1].dtype, *args[2:])
            return func(args[0], *map(_to_meta, args[1:]), **{key: _to_meta(value) for key, value in kwargs.items()})
        return func(*args, **kwargs)

    def _of_numbers(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a tensor of numbers, some of which may be tensors on meta."""
        if func in (Tensor.new_tensor, Tensor.new) and args[0].is_meta:  # else torch makes it on meta
            with _disable_current_modes():
                args = (torch.empty(0, dtype=args[0].dtype), *args[1:])
        lists = [tree_map(self._number, arg) if isinstance(arg, list | tuple) else arg for arg in args]
        return func(*lists, **kwargs)

    def _number(self, leaf: Any) -> Any:
        return self._trace.value(leaf) if isinstance(leaf, Tensor) and leaf.is_meta else leaf


def _says_meta(argument: Any) -> bool:
    """Return whether an argument names the device meta."""
    return isinstance(argument, torch.device | str) and str(argument) == "meta"


def _to_meta(argument: Any) -> Any:
    """Return meta for the CPU."""
    is_cpu = isinstance(argument, torch.device | str) and torch.device(argument).type == "cpu"
    return META if is_cpu else argument
