"""A forward of a model on the meta device, the parameters that it uses, and modules that stand in for others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from colossus.construct.init_trace import tensors_written
from colossus.convert.zeros import ASKS, EMPTY, SHAPE_ONLY, off_meta
from colossus.layout.operators import OperatorMode

_aten = torch.ops.aten
_META, _CPU = torch.device("meta"), torch.device("cpu")


class ForwardFlow(OperatorMode):
    """A mode in which a model on the meta device runs its forward, under ``no_grad``.

    Tensors that do not depend on the model's tensors have values (masks, positions), so that a forward may branch on
    them. All others are on meta, whatever device their operands are on. Where a forward asks for their values (which
    tokens go to an expert), they are zeros.

    Attributes:
        uses: names of the parameters and buffers that operations took.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self._names = {key_of(tensor): name for name, tensor in tensors}
        self.uses: set[str] = set()

    def count(self, tensor: Tensor) -> None:
        """Record the use of a tensor if it is a parameter or a buffer."""
        if name := self._names.get(key_of(tensor)):
            self.uses.add(name)

    @contextmanager
    def not_counting(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Let operations inside the context take these parameters or buffers without counting as uses."""
        hidden = {key: self._names.pop(key) for key in {key_of(tensor) for tensor in tensors} & self._names.keys()}
        try:
            yield
        finally:
            self._names.update(hidden)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # tensors saved for backward keep their subclass
            return self._follow(func, args, dict(kwargs or {}))

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in operands:
            self.count(tensor)
        if func.overloadpacket in SHAPE_ONLY:
            operands = []
            args = (off_meta(args[0]), *args[1:])
        on_meta = any(map(_is_meta, operands))
        if kwargs.get("device") is not None or (on_meta and "device" in kwargs):
            kwargs["device"] = _META if on_meta else _CPU if kwargs["device"] == _META else kwargs["device"]
        written = list(tensors_written(func, args, kwargs))
        if on_meta and not all(map(_is_meta, written)):
            args, kwargs = tree_map(off_meta, (args, kwargs))
            on_meta = False
        out = _on_meta(func, args, kwargs) if on_meta else func(*args, **kwargs)
        if func.overloadpacket in EMPTY:
            out.zero_()
        return out


def key_of(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():  # else a build returns the storage with values
        return tensor.untyped_storage()._cdata


def _is_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"  # a build hides `is_meta`


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation on meta; if its shape depends on values, they are zeros."""
    if func is _aten._grouped_mm.default:  # on meta torch takes bfloat16 only
        return args[0].new_empty((*args[0].shape[:-1], args[1].shape[-1]), device=_META)
    if ASKS.intersection(func.tags):
        args, kwargs = tree_map(off_meta, (args, kwargs))
        return tree_map(_to_meta, func(*args, **kwargs))
    args, kwargs = tree_map(_to_meta, (args, kwargs))
    return func(*args, **kwargs)


def _to_meta(leaf: Any) -> Any:
    return leaf.to(_META) if isinstance(leaf, Tensor) and not _is_meta(leaf) and leaf.dim() else leaf


def stand_in_for(module: nn.Module, call: Callable[..., Any]) -> nn.Module:
    """Return a copy of a module, with the same parameters and without hooks, whose forward is ``call``."""
    stand_in: nn.Module = object.__new__(type(module))
    no_hooks = {name: value for name, value in vars(nn.Module()).items() if "hooks" in name}
    vars(stand_in).update(vars(module) | no_hooks | {"forward": call})
    return stand_in


@contextmanager
def standing_in(model: nn.Module, calls: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Call these functions in place of the modules of these names inside the context.

    Hooks that the forward puts on a stand-in are on its module afterwards.
    """
    modules = {name: model.get_submodule(name) for name in calls}
    stand_ins = {id(module): stand_in_for(module, calls[name]) for name, module in modules.items()}
    places = [
        (owner, leaf, module)
        for owner in model.modules()
        for leaf, module in owner._modules.items()
        if id(module) in stand_ins
    ]
    for owner, leaf, module in places:
        owner._modules[leaf] = stand_ins[id(module)]
    try:
        yield
    finally:
        for owner, leaf, module in places:
            owner._modules[leaf] = module
        for module in modules.values():
            for name, hooks in vars(stand_ins[id(module)]).items():
                if "hooks" in name and hooks:
                    vars(module)[name].update(hooks)


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Call a model with its input: a dict is its keyword arguments."""
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)
