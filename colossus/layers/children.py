"""How our layers call the modules inside of them, which may be a user's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor, nn

from colossus.error_place import located_error
from colossus.layers.checkpointed_forward import is_checkpointed
from colossus.layers.layer import Layer
from colossus.layers.model_parallel import ModelParallel
from colossus.layout.activation import Activation
from colossus.sharded_tensor.regions import move, to_whole
from colossus.sharded_tensor.tensor import ShardedTensor, unwrap, wrap

_CALL = nn.Module.__call__
_PACKAGE = __name__.partition(".")[0] + "."


def is_ours(module: nn.Module) -> bool:
    """Whether ``module`` is a layer of ours whose ``forward`` nobody has overridden or replaced.

    Such a layer takes what is split; anything else is right on what is whole.
    """
    if not isinstance(module, Layer) or ("forward" in module.__dict__ and not is_checkpointed(module)):
        return False
    kind = type(module)
    return _is_of_package(kind.forward) and kind.__call__ is _CALL


@cache
def _is_of_package(function: Callable[..., Any]) -> bool:
    return function.__module__.startswith(_PACKAGE)


def call(
    child: nn.Module,
    x: Tensor,
    parallel: ModelParallel,
    target: Activation | None = None,
    *,
    outputs: int | None = None,
    **more: Any,
) -> Any:
    """``child(x)``; a module of a user's gets x in the whole layout, and what it returns is moved back.

    Args:
        target: the layout of what is returned; by default that to which x comes back.
        outputs: how many outputs a fused linear gives, as a tuple; None for one tensor.
        more: keyword arguments of the child; a user's module gets those that are not None.

    Raises:
        ValueError: when the child returns something else than these tensors.
    """
    if is_ours(child):
        out = child(x, **more)
        if target is None and outputs is None:
            return out
    else:
        out = child(to_whole(x), **{key: value for key, value in more.items() if value is not None})
    return_layout = x.placement.return_layout if isinstance(x, ShardedTensor) else parallel.regions.whole
    target = target or return_layout
    if outputs is None:
        if not isinstance(out, Tensor):
            raise located_error(f"a {type(child).__name__} returned {_kind(out)}; a tensor is needed")
        return _moved(out, target, return_layout, parallel)
    if not isinstance(out, tuple | list) or len(out) != outputs:
        raise located_error(
            f"a {type(child).__name__} returned {_kind(out)}; it must return {outputs} tensors, as the Linear(.., "
            f"{{name: size, ..}}) does in whose place it is"
        )
    return tuple(_moved(part, target, return_layout, parallel) for part in out)


def _moved(x: Tensor, target: Activation, return_layout: Activation, parallel: ModelParallel) -> Tensor:
    local, placement = unwrap(x, parallel)
    if placement.activation == target and placement.return_layout == return_layout:
        return x
    local = move(local, placement.activation, target, parallel)
    return wrap(local, replace(placement, return_layout=return_layout).moved(target, local.dim()))


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"one tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")
