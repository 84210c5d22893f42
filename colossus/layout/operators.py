"""Calls of torch's functions as ATen names them: one name for all forms of an operator, its arguments by name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import TracingContext
from torch.utils._python_dispatch import TorchDispatchMode

#: second names of torch's functions -> the first
_ALIASES = {
    "absolute": "abs", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh", "arctan": "atan",
    "arctan2": "atan2", "arctanh": "atanh", "divide": "div", "expit": "sigmoid", "fix": "trunc", "greater": "gt",
    "greater_equal": "ge", "less": "lt", "less_equal": "le", "logsigmoid": "log_sigmoid", "multiply": "mul",
    "negative": "neg", "not_equal": "ne", "psi": "digamma", "subtract": "sub", "true_divide": "div", "zero": "fill",
    "_threshold": "threshold", "concat": "cat", "concatenate": "cat", "swapaxes": "transpose", "swapdims": "transpose",
    "moveaxis": "movedim", "reshape": "view", "_unsafe_view": "view", "reshape_as": "view_as",
    "split_with_sizes": "split", "unsafe_split": "split", "unsafe_chunk": "chunk",
    # operators, without the r or i of their other forms
    "truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "invert": "bitwise_not", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
    "pos": "positive",
}  # fmt: skip

#: overloads that work element by element, though torch does not tag them
_UNTAGGED = {
    "hardswish.default", "log_sigmoid.default", "floor_divide.default", "floor_divide.Scalar", "isclose.default",
    "fill.Scalar", "fill.Tensor", "masked_fill.Tensor", "rsub.Tensor", "where.ScalarOther", "where.ScalarSelf",
    "where.Scalar",
}  # fmt: skip

#: Python functions made of pointwise ones, functions that copy or convert, and constants of the same shape
_ALWAYS_POINTWISE: set[Any] = {
    F.softsign,
    F.tanhshrink,
    torch.clone,
    torch.zeros_like,
    torch.ones_like,
    torch.full_like,
    *(getattr(Tensor, n) for n in ("clone", "contiguous", "detach", "float", "double", "half", "bfloat16", "bool",
                                   "int", "long", "to", "type", "type_as")),
}  # fmt: skip

#: function -> yes, no, or the name of the ATen operator whose overload decides at each call
_verdicts: dict[Any, bool | str] = {}


class OperatorMode(TorchDispatchMode):
    """A mode that sees operators, and imports no compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: else torch imports torch._dynamo at the first operator (1.6 s a rank)."""
        return False


def is_pointwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call computes each element of its output from the same elements of its operands alone.

    torch tags such overloads of its operators. Random ones are not among them: dropout is pointwise by shape, but its
    masks must differ between shards.
    """
    verdict = _verdicts.get(func)
    if verdict is None:
        verdict = _verdicts[func] = _verdict(func)
    if isinstance(verdict, bool):
        return verdict
    overload = _resolve(verdict, args, kwargs)
    return overload is not None and _is_tagged(verdict, overload)


def _verdict(func: Callable[..., Any]) -> bool | str:
    if func in _ALWAYS_POINTWISE:
        return True
    name = aten_name(getattr(func, "__name__", ""))
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    # only overloads that take a tensor and no ``out``, which is checked like other operands
    overloads = [
        overload
        for overload in overloads
        if any(str(arg.type) == "Tensor" for arg in overload._schema.arguments)
        and not any(arg.is_out for arg in overload._schema.arguments)
    ]
    tagged = {_is_tagged(name, overload) for overload in overloads}
    return name if len(tagged) == 2 else tagged == {True}


#: torch.compile calls it and does not trace it, as with torch.compiler.assume_constant_result, which imports dynamo
_verdict._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_tagged(name: str, overload: Any) -> bool:
    random = torch.Tag.nondeterministic_seeded in overload.tags
    if random or any(str(result.type) != "Tensor" for result in overload._schema.returns):  # `equal` returns a bool
        return False
    return torch.Tag.pointwise in overload.tags or f"{name}.{overload._overloadname}" in _UNTAGGED


def aten_name(name: str) -> str:
    """Return the name of a function's operator: ``add`` of ``add_``, ``__radd__`` and ``__iadd__``."""
    if name.startswith("__"):
        name = name.strip("_")
        if name[:1] in ("r", "i") and hasattr(Tensor, f"__{name[1:]}__"):
            name = name[1:]
    name = name.rstrip("_")
    name = _ALIASES.get(name, name)
    short = name.removeprefix("special_")  # log1p has two names, entr one
    return _ALIASES.get(short, short) if hasattr(torch.ops.aten, _ALIASES.get(short, short)) else name


def _resolve(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the overload that takes these arguments, or None."""
    try:
        overload = torch._C._jit_resolve_packet(f"aten::{name}", *args, **kwargs)
    except RuntimeError:
        return None
    return getattr(getattr(torch.ops.aten, name), overload)


class Call(NamedTuple):
    """One call of a function.

    Attributes:
        name: name of the ATen operator; a Python function has its own.
        arguments: arguments by their names in the operator's schema or the function's signature; the tensor is
            ``self``. If torch knows no names, all but the first are ``others``.
        overload: the ATen overload; None for a Python function.
    """

    name: str
    arguments: dict[str, Any]
    overload: Any

    @property
    def is_reduction(self) -> bool:
        return self.overload is not None and torch.Tag.reduction in self.overload.tags

    def get(self, *names: str, default: Any = None) -> Any:
        return next((self.arguments[name] for name in names if name in self.arguments), default)


#: second names of arguments -> the first
_ARGUMENTS = {"axis": "dim", "dims": "dim", "keepdims": "keepdim", "axis0": "dim0", "axis1": "dim1", "input": "self",
              "tensor": "self", "x": "self"}  # fmt: skip

#: operators whose sizes or dims may be separate arguments
_TAKE_SIZES = {"view", "permute", "expand", "repeat", "tile", "flip"}


def bind(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Return the call with its operator and named arguments; they stay unnamed where torch does not name them."""
    own_name = getattr(func, "__name__", "")
    name = aten_name(own_name)
    if isinstance(func, FunctionType) and not own_name.startswith("__"):
        try:
            bound = inspect.signature(func).bind(*args, **kwargs).arguments
        except TypeError:
            bound = {}
        return Call(name, {_ARGUMENTS.get(key, key): value for key, value in bound.items()}, None)
    if own_name.startswith("__r"):
        args = args[::-1]
    if name == "view" and len(args) == 2 and isinstance(args[1], Tensor):
        name = "view_as"
    if hasattr(torch.ops.aten, name):
        if name in _TAKE_SIZES and len(args) > 1 and isinstance(args[1], int):  # x.permute(0, 1) is permute(x, (0, 1))
            args = (args[0], args[1:])
        numpy = {_ARGUMENTS.get(key, key): value for key, value in kwargs.items()}
        for named in (kwargs, numpy):
            overload = _resolve(name, args, named)
            if overload is not None:
                names = [argument.name for argument in overload._schema.arguments]
                bound = {**dict(zip(names, args, strict=False)), **named}
                if type(bound.get("unbiased")) is int:  # torch's parser takes a dim of std and var for it
                    bound["dim"] = bound.pop("unbiased")
                return Call(name, {_ARGUMENTS.get(key, key): value for key, value in bound.items()}, overload)
    return Call(
        name, {"self": args[0], "others": (args[1:], kwargs)} if args[1:] or kwargs else {"self": args[0]}, None
    )


def tensors_of(nest: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among the arguments of a call. torch's pytree, in Python, takes ten times as long."""
    tensors: list[Tensor] = []
    for x in nest:
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, (tuple, list)):
            tensors += tensors_of(x)
        elif isinstance(x, dict):
            tensors += tensors_of(x.values())
    return tensors


# --- functions that parts of tensors may call freely


def is_made_fake() -> bool:
    """Return whether a compiler, which has begun a graph, makes its fake of what a rank has: that has its own sizes."""
    return not torch.compiler.is_dynamo_compiling() and TracingContext.try_get() is not None


#: functions that tell sizes, by name: the answer for the shape of the whole tensor
SIZES: dict[str, Callable[..., Any]] = {
    "size": lambda shape, dim=None: shape if dim is None else shape[dim],
    **dict.fromkeys(("numel", "nelement"), lambda shape: math.prod(shape)),
    "__len__": lambda shape: shape[0],
}

#: functions whose second argument, if it is a tensor, provides a dtype or a device
LIKE_FIRST = {"to", "type_as"}
#: functions that return a property of a tensor, or make a plain one
PASSED_ON = {
    "dim", "size", "ndimension", "numel", "nelement", "element_size", "is_contiguous", "stride", "is_floating_point",
    "is_complex", "is_signed", "is_tensor", "is_inference", "is_conj", "is_neg", "is_shared", "is_pinned", "get_device",
    "retain_grad", "requires_grad_", "data_ptr", "storage_offset", "untyped_storage", "__len__", "__hash__", "__set__",
    "__delete__", "__dir__", "__reduce_ex__", "backward", "as_subclass", "result_type", "is_same_size", "_is_view",
    "_is_zerotensor", "_is_functional_tensor", "register_post_accumulate_grad_hook", "new_zeros", "new_ones",
    "new_empty", "new_full", "new_tensor", "new",
}  # fmt: skip
