"""A parameter of which a rank holds a part, or nothing for now, as a type that refuses to stand for the whole of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import optimizer as torch_optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from colossus.error_place import located_error
from colossus.layout.parameter import ParameterSpec, attach, spec_of

Function = Callable[..., Any]

#: inside of this block a `SplitParameter` is the plain tensor that the rank holds: for code that knows it as a shard,
#: and where the time of a step is spent (the type costs some microseconds at each look at it)
as_shards = torch._C.DisableTorchFunctionSubclass


@dataclass(frozen=True)
class Reason:
    """Why functions are refused a parameter.

    Attributes:
        held: what this rank has of it, in words.
        remedy: what to do instead of calling a function with it.
        hides_values: whether no function may read it; else those that want no gradient of it may, products excepted.
    """

    held: Callable[[Tensor, ParameterSpec], str]
    remedy: Callable[[Function, ParameterSpec], str]
    hides_values: bool = False


#: what to do about a parameter that is gathered with its block
_CALL_THE_BLOCK = (
    "A block is whole while it is called, as block(x): compute inside of its forward what needs its parameters, and "
    "neither keep nor return them; or take parallel.zero = 2 or less, or parallel.tensor.weights = 'step'"
)


def _held_shard(parameter: Tensor, spec: ParameterSpec) -> str:
    return f"{' x '.join(map(str, parameter.shape))}, stored as {spec.layout}"


def _remedy_of_shard(func: Function, spec: ParameterSpec) -> str:
    if spec.layout.stored:
        return _CALL_THE_BLOCK
    if func is Tensor.__getitem__:
        return "Call the layer: an Embedding with the numbers of the rows; a PositionEmbedding adds the first rows to x"
    if func in _PRODUCTS or func in _TRANSPOSITIONS:
        return (
            "Call the layer; a head with the weight of an embedding is colossus.layers.LMHead(hidden_size, vocab_size, "
            "tied_to=embedding)"
        )
    return (
        "A penalty on weights belongs to the optimizer (weight_decay); numbers for a log come from "
        "colossus.checkpoint.full_state_dict(model, context); a parameter that is only used by hand is a "
        "torch.nn.Parameter, which every rank has whole"
    )


def _held_while_freed(parameter: Tensor, spec: ParameterSpec) -> str:
    return "nothing while its block does not run: parallel.zero = 3 has freed it"


def _remedy_of_freed(func: Function, spec: ParameterSpec) -> str:
    return _CALL_THE_BLOCK


def _held_rows(parameter: Tensor, spec: ParameterSpec) -> str:
    return f"the {parameter.shape[0]} of {spec.shards[0].shape[0]} rows that it owns"


def _remedy_of_table(func: Function, spec: ParameterSpec) -> str:
    return (
        f"Look rows up by their ids, in the model itself (a copy of it finds none); or let every rank hold the whole "
        f"table, with parallel.strategy.ways = {{{spec.name!r}: 'gather'}} (or 'dense'). For a log or an export "
        f"colossus.checkpoint.full_state_dict(model, context) has the whole of it"
    )


#: a shard of a parameter of ours; a whole parameter whose memory is freed (ZeRO-3); the rows of a table that this rank
#: owns, which are for lookups (sparse=True)
SHARD = Reason(_held_shard, _remedy_of_shard)
FREED = Reason(_held_while_freed, _remedy_of_freed, hides_values=True)
OWNED = Reason(_held_rows, _remedy_of_table, hides_values=True)


class SplitParameter(nn.Parameter):
    """A parameter that is not the one its name says, for ``reason``.

    Our layers use what the rank holds as what it is. Any other function would compute with a smaller parameter, with
    other values on each rank, so those that want its gradient raise, and products; where its values are hidden, all
    do that ask for more than its shape and kind.
    """

    reason: Reason = SHARD

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied: SplitParameter = super().__deepcopy__(memo)
        copied.reason = self.reason
        return attach(copied, spec_of(self))

    def __repr__(self) -> str:  # type: ignore[override]
        if not self.reason.hides_values:
            return super().__repr__()
        return f"SplitParameter({spec_of(self).name}: this rank holds {self.reason.held(self, spec_of(self))})"

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
        hidden = [leaf for leaf in leaves if isinstance(leaf, SplitParameter) and leaf.reason.hides_values]
        is_of_its_shape = func in _OF_ITS_SHAPE and args[0] is args[1]
        if hidden and not (is_of_its_shape or func in _OF_ITS_KIND):
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
    return parameter


def hide_values(parameter: nn.Parameter, reason: Reason) -> type[nn.Parameter]:
    """From now on functions are refused the parameter for this reason; gives the type that it had."""
    kind = type(parameter)
    parameter.__class__ = SplitParameter
    parameter.reason = reason  # type: ignore[attr-defined]
    return kind


def show_values(parameter: nn.Parameter, kind: type[nn.Parameter]) -> None:
    """Undo `hide_values`, which gave ``kind``."""
    vars(parameter).pop("reason", None)
    parameter.__class__ = kind


def _refusal(parameter: SplitParameter, func: Function) -> str:
    spec, reason = spec_of(parameter), parameter.reason
    return (
        f"{spec.name or 'parameter'} ({spec.description}): {getattr(func, '__name__', func)} was called with the "
        f"parameter itself, of which this rank holds {reason.held(parameter, spec)}; the result would be wrong. "
        f"{reason.remedy(func, spec)}"
    )


#: functions for which a shard is wrong whether or not gradients are wanted
_PRODUCTS: set[Any] = {
    F.linear, F.bilinear, F.embedding, F.embedding_bag, torch.einsum, F.conv1d, F.conv2d, F.conv3d, F.layer_norm,
    *(getattr(torch, name) for name in ("matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "tensordot")),
    *(getattr(Tensor, name) for name in ("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm")),
}  # fmt: skip

_TRANSPOSITIONS: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")),
    torch.t, torch.transpose, Tensor.t, Tensor.transpose, Tensor.permute,
}  # fmt: skip

_BACKWARD: set[Any] = {torch.autograd.backward, torch.autograd.grad}

#: of a tensor and itself, the way to its node in the graph
_OF_ITS_SHAPE: set[Any] = {Tensor.view_as, Tensor.expand_as}

#: what only tells or sets something about a tensor
_ABOUT: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "grad", "data", "requires_grad", "is_leaf",
                                                 "grad_fn", "is_meta", "layout", "ndim", "_backward_hooks",
                                                 "_post_accumulate_grad_hooks", "_version", "is_cpu", "is_cuda",
                                                 "grad_dtype")),
    *(getattr(Tensor, name).__set__ for name in ("grad", "data", "requires_grad", "_backward_hooks", "grad_dtype")),
    *(getattr(Tensor, name) for name in ("dim", "size", "numel", "stride", "data_ptr", "is_floating_point",
                                         "is_contiguous", "element_size", "requires_grad_", "register_hook",
                                         "register_post_accumulate_grad_hook", "__hash__", "__len__",
                                         "untyped_storage")),
}  # fmt: skip

#: what hands out its values
_VALUES: set[Any] = {Tensor.detach, Tensor.clone}

#: what asks for no value of it, and what makes others of its shape or kind
_OF_ITS_KIND: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in ("is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "itemsize",
                                                 "nbytes", "output_nr", "retains_grad", "_base", "_grad")),
    *(getattr(Tensor, name) for name in ("__format__", "__dir__", "type", "get_device", "is_complex", "is_signed",
                                         "is_inference", "is_shared", "is_pinned", "nelement", "ndimension",
                                         "is_same_size", "is_conj", "is_neg", "storage_offset", "new_empty",
                                         "new_zeros", "new_ones", "new_full")),
    *(getattr(torch, name) for name in ("is_complex", "is_floating_point", "is_same_size", "numel", "empty_like",
                                        "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")),
}  # fmt: skip

# as torch.distributed does for DTensor: else an optimizer on CUDA takes these parameters one by one
torch_optimizer._foreach_supported_types += [SplitParameter]
