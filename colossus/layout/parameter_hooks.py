"""Hooks and attributes that users put onto parameters: how another parameter takes them, and hooks on a part of one."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from colossus.error_place import located_error
from colossus.layout.operators import OperatorMode
from colossus.layout.parameter import spec_of

#: names of the dicts in which a tensor keeps its hooks
_HOOKS = BACKWARD, POST_ACCUMULATE = ("_backward_hooks", "_post_accumulate_grad_hooks")
_aten = torch.ops.aten


def is_of_colossus(hook: Any) -> bool:
    """Return whether a function, or what a partial of one calls, is defined in this package."""
    while isinstance(hook, partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return str(home).partition(".")[0] == "colossus"


def user_hooks(parameter: Tensor, *kinds: str) -> list[Any]:
    """Return the hooks on a parameter that are a user's, of these kinds or of both."""
    dicts = [getattr(parameter, kind) or {} for kind in kinds or _HOOKS]
    return [
        hook for hooks in dicts for hook in hooks.values() if isinstance(hook, PartHook) or not is_of_colossus(hook)
    ]


def take_attributes(made: Tensor, parameter: Tensor) -> None:
    """Let ``made`` have the attributes that a user has set on ``parameter``."""
    known = vars(made)
    known.update({name: value for name, value in vars(parameter).items() if name not in known and not _is_ours(name)})


def take_hooks(made: Tensor, parameter: Tensor) -> None:
    """Let ``made`` have the hooks of ``parameter``: the same dicts, by which handles remove them."""
    for kind in _HOOKS:
        if getattr(parameter, kind):
            setattr(made, kind, getattr(parameter, kind))


def copy_hooks(made: Tensor, *parameters: Tensor) -> None:
    """Give ``made``, which is whole, the user's hooks of ``parameters``; to remove one there leaves it here."""
    for kind in _HOOKS:
        hooks = dict.fromkeys(hook for parameter in parameters for hook in user_hooks(parameter, kind))
        if hooks:
            users = [hook.hook if isinstance(hook, PartHook) else hook for hook in hooks]
            setattr(made, kind, OrderedDict(enumerate(users)))


def _is_ours(name: str) -> bool:
    return name.startswith("_colossus_") or name == "hidden"


def guard_hooks(parameter: Tensor) -> None:
    """Replace the user's hooks on a parameter of which this rank holds a part by `PartHook`s, under the same keys."""
    for kind in _HOOKS:
        for key, hook in (getattr(parameter, kind) or {}).items():
            getattr(parameter, kind)[key] = guarded(hook, parameter)


def guarded(hook: Callable[..., Any], parameter: Tensor) -> Callable[..., Any]:
    """Return the `PartHook` in the place of a user's hook; a hook of colossus knows parts, and stays."""
    return hook if isinstance(hook, PartHook) or is_of_colossus(hook) else PartHook(hook, parameter)


class PartHook:
    """A user's hook on a parameter of which this rank holds a part: it gets that part of the gradient.

    That is right where the hook computes element by element (a factor, a clamp, NaN to zero). Whatever else it asks of
    the gradient, a norm or a shape, would be another number on each rank and is refused. So are operands of the shape
    of the whole. A gradient that is whole, as one that ZeRO will cut, is passed on as it is.
    """

    def __init__(self, hook: Callable[..., Any], parameter: Tensor) -> None:
        self.hook, self._spec = hook, spec_of(parameter)

    def __call__(self, tensor: Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # a `ParameterPart` would refuse less
            gradient = tensor.grad if isinstance(tensor, nn.Parameter) else tensor
            if gradient is None or gradient.numel() == self._spec.num_elements:
                return self.hook(tensor)
            with _Elementwise(self, gradient), _NoSizes(self, gradient):
                return self.hook(tensor)

    def refuse(self, what: str) -> ValueError:
        """Return the error for what a hook asks of the gradient."""
        spec = self._spec
        remedy = (
            "Registered in the model's constructor it gets the whole gradient of this rank's samples"
            if spec.layout.stored
            else "Leave its module whole: torch.nn's, under colossus.parallelize by the rule 'torch'"
        )
        return located_error(
            f"a hook on {spec.name} ({spec.description}) {what}, but this rank holds a part of the gradient "
            f"({spec.layout}), on which a hook may compute element by element alone. {remedy}"
        )


class _NoSizes(TorchFunctionMode):
    """Refuses to tell sizes of a part."""

    def __init__(self, hook: PartHook, gradient: Tensor) -> None:
        super().__init__()
        self._hook, self._shape = hook, tuple(gradient.shape)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in SIZES and tuple(args[0].shape) == self._shape:
            raise self._hook.refuse("asks for its size")
        return out


#: what a part of a tensor answers otherwise than the whole
SIZES: set[Any] = {
    Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__, torch.numel,
    Tensor.shape.__get__,  # type: ignore[attr-defined]
}  # fmt: skip

#: work element by element though torch does not say so
_ELEMENTWISE = {
    _aten.detach, _aten.alias, _aten.clone, _aten._to_copy, _aten.copy_, _aten.fill_, _aten.zero_, _aten.zeros_like,
    _aten.ones_like, _aten.full_like, _aten.empty_like, _aten.masked_fill_,
}  # fmt: skip


def _is_elementwise(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags or func.overloadpacket in _ELEMENTWISE


class _Elementwise(OperatorMode):
    """Refuses what is computed from a part otherwise than element by element."""

    def __init__(self, hook: PartHook, gradient: Tensor) -> None:
        super().__init__()
        self._hook, self._shape = hook, tuple(gradient.shape)
        #: storages that are computed from the gradient, alive so that no other gets their address
        self._parts = [gradient.untyped_storage()]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # what follows may ask for sizes
            return self._checked(func, args, kwargs or {})

    def _checked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        keys = {part._cdata for part in self._parts}
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(leaf.untyped_storage()._cdata in keys for leaf in leaves):
            return func(*args, **kwargs)
        name, shapes = func.overloadpacket.__name__, [tuple(leaf.shape) for leaf in leaves]
        if not _is_elementwise(func):
            raise self._hook.refuse(f"calls {name}")
        try:
            out = func(*args, **kwargs)
        except RuntimeError as error:
            raise self._hook.refuse(f"calls {name} on shapes {shapes}") from error
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                if math.prod(leaf.shape) and tuple(leaf.shape) != self._shape:
                    raise self._hook.refuse(f"calls {name} on shapes {shapes}")
                self._parts.append(leaf.untyped_storage())
        return out
