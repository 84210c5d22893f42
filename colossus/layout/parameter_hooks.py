"""Users' hooks on parameters and their attributes: copies for another parameter, and hooks that get a rank's part."""

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

#: names of the dicts with a tensor's hooks
_HOOKS = BACKWARD, POST_ACCUMULATE = ("_backward_hooks", "_post_accumulate_grad_hooks")
_aten = torch.ops.aten


def is_of_colossus(hook: Any) -> bool:
    """Return whether a function, or the function of a partial, is defined in this package."""
    while isinstance(hook, partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return str(home).partition(".")[0] == "colossus"


def user_hooks(parameter: Tensor, *kinds: str) -> list[Any]:
    """Return the user's hooks on a parameter, of these kinds or of both."""
    dicts = [getattr(parameter, kind) or {} for kind in kinds or _HOOKS]
    return [
        hook for hooks in dicts for hook in hooks.values() if isinstance(hook, PartHook) or not is_of_colossus(hook)
    ]


def copy_attributes(target: Tensor, parameter: Tensor) -> None:
    """Copy the attributes that a user has set on ``parameter`` to ``target``."""
    own = vars(target)
    own.update({name: value for name, value in vars(parameter).items() if name not in own and not _is_own(name)})


def share_hooks(target: Tensor, parameter: Tensor) -> None:
    """Give ``target`` the hooks of ``parameter``: the same dicts, so that handles remove them from both."""
    for kind in _HOOKS:
        if getattr(parameter, kind):
            setattr(target, kind, getattr(parameter, kind))


def copy_hooks(target: Tensor, *parameters: Tensor) -> None:
    """Copy the user's hooks of ``parameters`` to ``target``, which is whole.

    Removing a hook from a parameter does not remove it from the target.
    """
    for kind in _HOOKS:
        hooks = dict.fromkeys(hook for parameter in parameters for hook in user_hooks(parameter, kind))
        if hooks:
            users = [hook.hook if isinstance(hook, PartHook) else hook for hook in hooks]
            setattr(target, kind, OrderedDict(enumerate(users)))


def _is_own(name: str) -> bool:
    """Return whether colossus sets this attribute; `SplitParameter` has ``hidden``."""
    return name.startswith("_colossus_") or name == "hidden"


def guard_hooks(parameter: Tensor) -> None:
    """Replace the user's hooks on a parameter of which this rank has a part by `PartHook`s, under the same keys."""
    for kind in _HOOKS:
        for key, hook in (getattr(parameter, kind) or {}).items():
            getattr(parameter, kind)[key] = guarded(hook, parameter)


def guarded(hook: Callable[..., Any], parameter: Tensor) -> Callable[..., Any]:
    """Return the `PartHook` in place of a user's hook; a hook of colossus, which knows parts, is returned as it is."""
    return hook if isinstance(hook, PartHook) or is_of_colossus(hook) else PartHook(hook, parameter)


class PartHook:
    """A user's hook on a parameter of which this rank has a part: it gets that part of the gradient.

    That is right if the hook computes element by element (a factor, a clamp, NaN to zero). A norm or a shape of the
    gradient would be another number on each rank, so other operations raise, and so do operands of the shape of the
    whole. A whole gradient, such as one that ZeRO has yet to cut, is passed unchanged.
    """

    def __init__(self, hook: Callable[..., Any], parameter: Tensor) -> None:
        self.hook, self._spec = hook, spec_of(parameter)

    def __call__(self, tensor: Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # a `ParameterPart` would allow more
            gradient = tensor.grad if isinstance(tensor, nn.Parameter) else tensor
            if gradient is None or gradient.numel() == self._spec.num_elements:
                return self.hook(tensor)
            with _Elementwise(self, gradient), _NoSizes(self, gradient):
                return self.hook(tensor)

    def refuse(self, what: str) -> ValueError:
        """Return the error for an operation of a hook on the gradient."""
        spec = self._spec
        remedy = (
            "A hook registered in the model's constructor gets the whole gradient of this rank's samples"
            if spec.layout.stored
            else "Keep its module unsplit: one of torch.nn (under colossus.parallelize by the rule 'torch')"
        )
        return located_error(
            f"a hook on {spec.name} ({spec.description}) {what}, but this rank has a part of the gradient "
            f"({spec.layout}), on which a hook may only compute element by element. {remedy}"
        )


class _NoSizes(TorchFunctionMode):
    """A mode that refuses to return sizes of a part."""

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


#: functions whose result differs between a part of a tensor and the whole
SIZES: set[Any] = {
    Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__, torch.numel,
    Tensor.shape.__get__,  # type: ignore[attr-defined]
}  # fmt: skip

#: operators that work element by element, though torch does not tag them
_ELEMENTWISE = {
    _aten.detach, _aten.alias, _aten.clone, _aten._to_copy, _aten.copy_, _aten.fill_, _aten.zero_, _aten.zeros_like,
    _aten.ones_like, _aten.full_like, _aten.empty_like, _aten.masked_fill_,
}  # fmt: skip


def _is_elementwise(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags or func.overloadpacket in _ELEMENTWISE


class _Elementwise(OperatorMode):
    """A mode that refuses operations on a part that do not work element by element."""

    def __init__(self, hook: PartHook, gradient: Tensor) -> None:
        super().__init__()
        self._hook, self._shape = hook, tuple(gradient.shape)
        #: storages computed from the gradient, kept alive so that no other gets their address
        self._parts = [gradient.untyped_storage()]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # the checks read sizes
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
