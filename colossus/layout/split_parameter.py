"""A parameter of which a rank holds a part, or nothing for now, as a type that refuses to stand for the whole of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import optimizer as torch_optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from colossus.error_place import located_error
from colossus.layout.parameter import attach, spec_of
from colossus.layout.parameter_hooks import guard_hooks, guarded

Function = Callable[..., Any]

#: inside of this block a `SplitParameter` is the plain tensor that the rank holds: for code that knows it as a shard,
#: and where the time of a step is spent (the type costs some microseconds at each look at it)
as_shards = torch._C.DisableTorchFunctionSubclass


#: what this rank has of a parameter whose values no function may read: of a whole one whose memory is freed, and of a
#: table that is for lookups (sparse=True)
FREED = "nothing while its block does not run: parallel.zero = 3 has freed it"
OWNED = "the rows that it owns"

_CALL_THE_BLOCK = (
    "A block is whole while it is called, as block(x): compute inside of its forward what needs its parameters, and "
    "neither keep nor return them; or take parallel.zero = 2 or less, or parallel.tensor.weights = 'step'"
)
_CALL_THE_LAYER = (
    "Call the layer; a head with the weight of an embedding is colossus.layers.LMHead(hidden_size, vocab_size, "
    "tied_to=embedding). A penalty on weights belongs to the optimizer (weight_decay); numbers for a log come from "
    "colossus.checkpoint.full_state_dict(model, context); a parameter that is only used by hand is a "
    "torch.nn.Parameter, which every rank has whole. colossus.parallelize leaves a module whole by the rule 'torch'"
)


class SplitParameter(nn.Parameter):
    """A parameter of which this rank holds a shard, or ``hidden`` (see `hide_values`).

    Our layers use what the rank holds as what it is. Any other function would compute with a smaller parameter, with
    other values on each rank, so those that want its gradient raise, and products; where its values are hidden, all
    do that ask for more than its shape and kind.
    """

    hidden: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied: SplitParameter = super().__deepcopy__(memo)
        copied.hidden = self.hidden
        return attach(copied, spec_of(self))

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"SplitParameter({spec_of(self).name}: this rank holds {self.hidden})"
            if self.hidden
            else super().__repr__()
        )

    def register_hook(self, hook: Function) -> Any:
        """Register a hook on what this rank has of the gradient (`PartHook`)."""
        return super().register_hook(guarded(hook, self))

    def register_post_accumulate_grad_hook(self, hook: Function) -> Any:
        """Register a hook on the parameter with what this rank has of the gradient (`PartHook`)."""
        return super().register_post_accumulate_grad_hook(guarded(hook, self))

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT:
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs)
        if func in _BACKWARD:  # outside of the block below: under checkpointing this runs a user's forward
            args, kwargs = tree_map_only(SplitParameter, get_gradient_edge, (args, kwargs))
            return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        hidden = [leaf for leaf in leaves if isinstance(leaf, SplitParameter) and leaf.hidden]
        is_of_its_shape = func in _OF_ITS_SHAPE and args[0] is args[1]
        if hidden and not is_of_its_shape:
            raise located_error(_refusal(hidden[0], func))
        # products with an output are those of compiled graphs, whose layers were checked when they were traced
        is_of_graph = "out" in kwargs and not torch.is_grad_enabled()
        if func in _VALUES or is_of_graph or (func not in _PRODUCTS and not torch.is_grad_enabled()):
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs)
        parameter = next(leaf for leaf in leaves if isinstance(leaf, SplitParameter))
        with torch._C.DisableTorchFunctionSubclass():
            if is_of_its_shape:
                return func(*args, **kwargs)
            try:
                out = None if func in _PRODUCTS else func(*args, **kwargs)
            except (RuntimeError, IndexError) as error:
                if getattr(func, "__name__", "").rstrip("_") + "_" == getattr(func, "__name__", ""):
                    raise  # in place where gradients are wanted: torch says so
                raise located_error(_refusal(parameter, func)) from error
            known = {id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
            new = (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and id(leaf) not in known)
            if func in _PRODUCTS or any(leaf.requires_grad for leaf in new):
                raise located_error(_refusal(parameter, func))
        return out


def mark_split(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself, as a `SplitParameter` if its spec says that this rank holds a shard of it."""
    if spec_of(parameter).layout.shard_axes:
        parameter.__class__ = SplitParameter
        guard_hooks(parameter)
    return parameter


def hide_values(parameter: nn.Parameter, held: str) -> type[nn.Parameter]:
    """From now on functions are refused the parameter, of which this rank has ``held``; gives the type that it had."""
    kind = type(parameter)
    parameter.__class__ = SplitParameter
    parameter.hidden = held  # type: ignore[attr-defined]
    return kind


def show_values(parameter: nn.Parameter, kind: type[nn.Parameter]) -> None:
    """Undo `hide_values`, which gave ``kind``."""
    vars(parameter).pop("hidden", None)
    parameter.__class__ = kind


def _refusal(parameter: SplitParameter, func: Function) -> str:
    spec = spec_of(parameter)
    held = parameter.hidden or f"{' x '.join(map(str, parameter.shape))}, stored as {spec.layout}"
    remedy = _CALL_THE_BLOCK if spec.layout.stored or held == FREED else _CALL_THE_LAYER
    if held == OWNED:
        held = f"the {parameter.shape[0]} of {spec.shards[0].shape[0]} rows that it owns"
        remedy = (
            f"Look rows up by their ids, in the model itself (a copy of it finds none); or let every rank hold the "
            f"whole table, with parallel.strategy.ways = {{{spec.name!r}: 'gather'}} (or 'dense'). For a log or an "
            f"export colossus.checkpoint.full_state_dict(model, context) has the whole of it"
        )
    return (
        f"{spec.name or 'parameter'} ({spec.description}): {getattr(func, '__name__', func)} was called with the "
        f"parameter itself, of which this rank holds {held}; the result would be wrong. {remedy}"
    )


#: functions for which a shard is wrong whether or not gradients are wanted
_PRODUCTS: set[Any] = {
    F.linear, F.bilinear, F.embedding, F.embedding_bag, torch.einsum, F.conv1d, F.conv2d, F.conv3d, F.layer_norm,
    *(getattr(torch, name) for name in ("matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "tensordot")),
    *(getattr(Tensor, name) for name in ("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm")),
}  # fmt: skip

_BACKWARD: set[Any] = {torch.autograd.backward, torch.autograd.grad}

#: of a tensor and itself, the way to its node in the graph
_OF_ITS_SHAPE: set[Any] = {Tensor.view_as, Tensor.expand_as}

#: what only tells or sets something about a tensor, and what makes others of its shape or kind
_ABOUT: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "grad", "data", "requires_grad", "is_leaf", "grad_fn", "is_meta", "layout", "ndim",
        "_backward_hooks", "_post_accumulate_grad_hooks", "_version", "is_cpu", "is_cuda", "grad_dtype", "is_sparse",
        "is_sparse_csr", "is_quantized", "is_nested", "itemsize", "nbytes", "output_nr", "retains_grad", "_base",
        "_grad")),
    *(getattr(Tensor, name).__set__ for name in ("grad", "data", "requires_grad", "_backward_hooks", "grad_dtype")),
    *(getattr(Tensor, name) for name in (
        "dim", "size", "numel", "stride", "data_ptr", "is_floating_point", "is_contiguous", "element_size",
        "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__hash__", "__len__",
        "untyped_storage", "__format__", "__dir__", "type", "get_device", "is_complex", "is_signed", "is_inference",
        "is_shared", "is_pinned", "nelement", "ndimension", "is_same_size", "is_conj", "is_neg", "storage_offset",
        "new_empty", "new_zeros", "new_ones", "new_full")),
    *(getattr(torch, name) for name in (
        "is_complex", "is_floating_point", "is_same_size", "numel", "empty_like", "zeros_like", "ones_like",
        "full_like", "rand_like", "randn_like")),
}  # fmt: skip

#: what hands out its values
_VALUES: set[Any] = {Tensor.detach, Tensor.clone}

# as torch.distributed does for DTensor: else an optimizer on CUDA takes these parameters one by one
torch_optimizer._foreach_supported_types += [SplitParameter]
