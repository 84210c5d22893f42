"""Classes derived from a module of torch, and whether they compute the same as it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from colossus.layout.operators import OperatorMode

_aten = torch.ops.aten
#: members beside plain values that a class may define and still compute and store what its base does
_HARMLESS = {"__init__", "__repr__", "__module__", "__doc__", "__annotations__", "reset_parameters", "extra_repr"}


def torch_class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of torch.nn that computes what a module does, or the module's own where that may do more.

    A derived class computes the same if it defines only plain values, a constructor and a representation. A class
    derived from ``nn.Linear`` may also define a forward that gives the product and the sum.
    """
    base = torch_base(module)
    return type(module) if added_member(module, base) else base


def torch_base(module: nn.Module) -> type[nn.Module]:
    """Return the class of torch.nn from which a module's class derives."""
    return next(kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn.modules."))


def added_member(module: nn.Module, base: type[nn.Module]) -> str:
    """Return a member of a module's class that may compute or store more than its base does, or an empty text."""
    for kind in _derived(module, base):
        for name, value in vars(kind).items():
            is_code = callable(value) or hasattr(value, "__get__")
            if name in _HARMLESS or not is_code or name in ("__dict__", "__weakref__"):
                continue
            if name != "forward" or base is not nn.Linear or not _gives_a_linear(module):
                return name
    return ""


def class_attributes(module: nn.Module, base: type[nn.Module]) -> dict[str, Any]:
    """Return the plain values that classes between a module and its base define."""
    return {
        name: value
        for kind in reversed(_derived(module, base))
        for name, value in vars(kind).items()
        if not name.startswith("__") and not callable(value) and not hasattr(value, "__get__")
    }


def _derived(module: nn.Module, base: type[nn.Module]) -> list[type]:
    return [kind for kind in type(module).__mro__ if kind not in base.__mro__]


#: the operators of a product with a weight and a sum with a bias
_PRODUCTS = {
    _aten.t, _aten.transpose, _aten.permute, _aten.view, _aten._unsafe_view, _aten.expand, _aten.unsqueeze,
    _aten.squeeze, _aten.detach, _aten.alias, _aten.mm, _aten.bmm, _aten.addmm, _aten.add, _aten.add_, _aten.linear,
}  # fmt: skip


class _Operators(OperatorMode):
    """A mode that records the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.add(func.overloadpacket)
        return func(*args, **(kwargs or {}))


def _gives_a_linear(module: nn.Module) -> bool:
    """Return whether the forward of a class derived from ``nn.Linear`` is a product and a sum, tried on a few numbers.

    It may take a product with the weight and a sum with the bias, and nothing else.
    """
    with _disable_current_modes(), torch.no_grad():
        weight = nn.Parameter(_numbers(3, 5))
        bias = None if module._parameters.get("bias") is None else nn.Parameter(_numbers(3))
        tried: Any = object.__new__(type(module))
        vars(tried).update(vars(module))
        vars(tried)["_parameters"] = {"weight": weight, "bias": bias}
        tried.in_features, tried.out_features = 5, 3
        for is_training in (True, False):
            tried.training = is_training
            for shape in ((2, 5), (2, 4, 5)):
                x = _numbers(*shape)
                try:
                    with _Operators() as operators:
                        out = type(module).forward(tried, x)
                except Exception:
                    return False
                wanted = F.linear(x, weight, bias)
                is_same = isinstance(out, Tensor) and out.shape == wanted.shape and torch.allclose(out, wanted, 1e-12)
                if not is_same or not operators.seen <= _PRODUCTS:
                    return False
    return True


def _numbers(*shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(1, count + 1, dtype=torch.float64).mul_(1.7).cos_().view(shape)
