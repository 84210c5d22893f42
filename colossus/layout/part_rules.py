"""The functions of torch that are right on each rank's part of a parameter by itself.

Dims are counted from the right, from -1, so that they do not change where tensors are broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from colossus.layout.operators import bind, is_pointwise

Dims = frozenset[int]

#: copies, which torch does not tag as working element by element
_COPIES = {"copy_", "cpu", "cuda", "pin_memory", "requires_grad_"}
#: functions that work along a dim and keep it -> their default dim
_ALONG: Mapping[str, int | None] = {
    "normalize": 1,
    "softmax": None,
    "log_softmax": None,
    "cumsum": None,
    "cumprod": None,
}
#: reductions that torch does not tag as such
_REDUCTIONS = {"norm", "linalg_norm", "linalg_vector_norm", "logsumexp", "var", "std", "argmax", "argmin", "all", "any"}


def split_dims_of_result(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], parts: Sequence[tuple[Tensor, Dims]]
) -> Dims | None:
    """Return the dims of the result that ranks split, or None if the function is wrong on parts.

    Functions are right if they work element by element, or along explicit dims that are not split.

    Args:
        parts: the operands of which a rank has a part, each with its split dims.
    """
    if is_pointwise(func, args, kwargs) or getattr(func, "__name__", "") in _COPIES:
        split = frozenset().union(*(dims for _, dims in parts))
        is_alike = all(dim in dims or dim < -x.dim() or x.shape[dim] == 1 for x, dims in parts for dim in split)
        return split if is_alike else None
    if len(parts) != 1:
        return None
    call, ((x, split),) = bind(func, args, kwargs), parts
    is_kept = call.name in _ALONG
    if call.get("self") is not x or not (is_kept or call.is_reduction or call.name in _REDUCTIONS):
        return None
    named = call.get("dim", default=_ALONG.get(call.name))
    along = named if isinstance(named, tuple | list) else (named,)
    if not along or not all(isinstance(dim, int) and not isinstance(dim, bool) for dim in along):
        return None
    gone = {dim % x.dim() - x.dim() for dim in along}
    if gone & split:
        return None
    return (
        split
        if is_kept or call.get("keepdim")
        else frozenset(dim + sum(other > dim for other in gone) for dim in split)
    )
