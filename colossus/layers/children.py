"""How our layers call the layers inside of them: as modules, with a shorter way where nobody would see the difference.

A child is called as torch calls it, ``child(x)``: hooks run, and a ``forward`` of the user's own or a child that was
put in its place is what computes. Where the child is a layer of ours with its own ``forward`` and nothing listens
to the call, ``child.apply_local`` gives the same without wrapping the activation. Both move the same bytes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

from colossus.error_place import located_error
from colossus.layers.checkpointed_forward import is_checkpointed
from colossus.layers.layer import Layer
from colossus.layers.model_parallel import ModelParallel
from colossus.layers.sharded import move, to_whole, unwrap, wrap
from colossus.layers.token_dim import TokenDim
from colossus.layout.activation import Activation

_CALL = nn.Module.__call__


def computes_as_ours(module: nn.Module) -> bool:
    """Whether ``module`` is a layer of ours whose ``forward`` nobody has overridden or replaced.

    Such a layer understands split activations; anything else is right on activations in the whole layout.
    """
    if not isinstance(module, Layer) or ("forward" in module.__dict__ and not is_checkpointed(module)):
        return False
    kind = type(module)
    return kind.forward is kind.own_forward and kind.__call__ is _CALL


def is_listened_to(module: nn.Module) -> bool:
    """Whether a call of the module runs more than its own ``forward``: hooks of it or global ones, something compiled,
    or activation checkpointing."""
    own = module.__dict__
    return bool(
        "forward" in own
        or own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or _global_forward_hooks
        or _global_forward_pre_hooks
        or _global_backward_hooks
        or _global_backward_pre_hooks
        or module._compiled_call_impl is not None
    )


def run_child(
    parent: nn.Module,
    name: str,
    x: Tensor,
    source: Activation,
    target: Activation,
    *,
    outputs: int | None = None,
    **more: Any,
) -> Any:
    """``parent.<name>(x)`` of a plain local tensor laid out as ``source``, returned as ``target``.

    A child that is no layer of ours, or whose ``forward`` is overridden, is called with x in the whole layout.

    Args:
        parent: has a `ModelParallel` as ``parallel``.
        outputs: how many outputs a fused linear gives, as a tuple; None for one tensor.
        more: keyword arguments of the child; those that are None are left out for a child that is not ours.

    Raises:
        ValueError: when the child returns something else than these tensors.
    """
    child: Any = getattr(parent, name)
    ours = computes_as_ours(child)
    if ours and not is_listened_to(child):
        if child.local_layouts == 2 and (outputs is None) != child.is_fused:
            return child.apply_local(x, source, target, **more)
        if child.local_layouts == 1 and outputs is None and (source is target or source == target):
            return child.apply_local(x, source, **more)
    parallel: ModelParallel = parent.parallel  # type: ignore[assignment]
    marked = wrap(x, source, target, parallel, token_dim=_token_dim(x, parallel))
    if not ours:
        marked = to_whole(marked)
    out = child(marked, **{key: value for key, value in more.items() if value is not None})
    if outputs is None:
        return _local(parent, name, out, target)
    if not isinstance(out, tuple | list) or len(out) != outputs:
        raise located_error(
            f"{_title(parent)}: its {name} ({type(child).__name__}) returned {_kind(out)}; it must return {outputs} "
            f"tensors, as the Linear(.., {{name: size, ..}}) does that was there"
        )
    return tuple(_local(parent, name, part, target) for part in out)


def _local(parent: nn.Module, name: str, out: Any, target: Activation) -> Tensor:
    if not isinstance(out, Tensor):
        raise located_error(
            f"{_title(parent)}: its {name} ({type(getattr(parent, name)).__name__}) returned {_kind(out)}; a tensor is "
            f"needed"
        )
    return to_local(out, target, parent.parallel)  # type: ignore[arg-type]


def to_local(x: Tensor, target: Activation, parallel: ModelParallel) -> Tensor:
    """An activation in any layout, a plain one in the whole layout, as a plain local tensor laid out as ``target``."""
    local, reached, _ = unwrap(x, parallel)
    return move(local, reached, target, parallel.context)


def _token_dim(x: Tensor, parallel: ModelParallel) -> TokenDim | None:
    """Where a tensor inside of a block holds its tokens: dim -2, or all that was flattened into dim 0."""
    if parallel.sequence is None:
        return None
    if x.dim() != 2:
        return TokenDim(x.dim() - 2)
    num_tokens = parallel.batch_info.num_tokens
    count = parallel.sequence.padded_length(num_tokens) // parallel.sequence.num_shards if num_tokens else x.shape[0]
    return TokenDim(0, max(1, x.shape[0] // count))


def _title(parent: nn.Module) -> str:
    return parent.title if isinstance(parent, Layer) else type(parent).__name__


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"one tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")
