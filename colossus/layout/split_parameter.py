"""A parameter of which a rank holds a shard, as a type that refuses to stand for the whole of it."""

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
from colossus.layout.parameter import spec_of

#: inside of this block a `SplitParameter` is the plain tensor that the rank holds: for code that knows it as a shard,
#: and where the time of a step is spent (the type costs some microseconds at each look at it)
as_shards = torch._C.DisableTorchFunctionSubclass


class SplitParameter(nn.Parameter):
    """A rank's shard of a parameter of ours.

    Our layers multiply it as what it is. For any other function that wants its gradient it would be a smaller parameter
    with other values on each rank, so these raise; without gradients (optimizers, averages of weights, statistics) only
    products do.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # products with an output are those of compiled graphs, whose layers were checked when they were traced
        is_of_graph = "out" in kwargs and not torch.is_grad_enabled()
        if func in _ABOUT or is_of_graph or (func not in _SPECIAL and not torch.is_grad_enabled()):
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs)
        if func in _BACKWARD:  # outside of the block below: under checkpointing this runs a user's forward
            args, kwargs = tree_map_only(SplitParameter, get_gradient_edge, (args, kwargs))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OF_ITS_SHAPE and args[0] is args[1]:
                return func(*args, **kwargs)
            known = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            try:
                out = None if func in _PRODUCTS else func(*args, **kwargs)
            except (RuntimeError, IndexError) as error:
                if getattr(func, "__name__", "").rstrip("_") + "_" == getattr(func, "__name__", ""):
                    raise  # in place where gradients are wanted: torch says so
                raise located_error(_refusal(func, args, kwargs)) from error
            new = (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and id(leaf) not in known)
            if func in _PRODUCTS or any(leaf.requires_grad for leaf in new):
                raise located_error(_refusal(func, args, kwargs))
        return out


class FreedParameter(SplitParameter):
    """A whole parameter whose memory is freed while its block does not run (ZeRO-3)."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ABOUT or func in _BACKWARD:
            return super().__torch_function__(func, types, args, kwargs)
        parameter = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FreedParameter))
        raise located_error(
            f"{spec_of(parameter).name or 'a parameter'}: {getattr(func, '__name__', func)} was called with it while "
            f"its block does not run: parallel.zero = 3 has freed it. {_CALL_THE_BLOCK}"
        )


class OwnedTable(SplitParameter):
    """The rows of a table that this rank owns: they are for lookups, and stand for nothing else.

    Its shape can be asked for, and ``.data`` gives the rows as a plain tensor; everything else raises.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (
            (func in _ABOUT and func not in _ITS_VALUES)
            or func in _OF_ITS_KIND
            or func in _BACKWARD
            or (func in _OF_ITS_SHAPE and args[0] is args[1])
        ):
            return super().__torch_function__(func, types, args, kwargs)
        parameter = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, OwnedTable))
        raise located_error(_refusal_of_table(parameter, getattr(func, "__name__", str(func))))


#: what to do about a parameter that is gathered with its block
_CALL_THE_BLOCK = (
    "A block is whole while it is called, as block(x): compute inside of its forward what needs its parameters, and "
    "neither keep nor return them; or take parallel.zero = 2 or less, or parallel.tensor.weights = 'step'"
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

_SPECIAL: set[Any] = _PRODUCTS | _BACKWARD

#: of a tensor and itself, the way to its node in the graph
_OF_ITS_SHAPE: set[Any] = {Tensor.view_as, Tensor.expand_as}

#: what only tells or sets something about a tensor
_ABOUT: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "grad", "data", "requires_grad", "is_leaf",
                                                 "grad_fn", "is_meta", "layout", "ndim", "_backward_hooks",
                                                 "_post_accumulate_grad_hooks", "_version", "is_cpu", "is_cuda",
                                                 "grad_dtype")),
    *(getattr(Tensor, name).__set__ for name in ("grad", "data", "requires_grad", "_backward_hooks", "grad_dtype")),
    *(getattr(Tensor, name) for name in ("dim", "size", "numel", "stride", "data_ptr", "detach", "clone",
                                         "is_floating_point", "is_contiguous", "element_size", "requires_grad_",
                                         "register_hook", "register_post_accumulate_grad_hook", "__hash__", "__len__",
                                         "untyped_storage")),
}  # fmt: skip

#: what asks for no value of it, and what makes others of its shape or kind
_OF_ITS_KIND: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in ("is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "itemsize",
                                                 "nbytes", "output_nr", "retains_grad", "_base", "_grad")),
    *(getattr(Tensor, name) for name in ("__repr__", "__format__", "__dir__", "type", "get_device", "is_complex",
                                         "is_signed", "is_inference", "is_shared", "is_pinned", "nelement",
                                         "ndimension", "is_same_size", "is_conj", "is_neg", "storage_offset",
                                         "new_empty", "new_zeros", "new_ones", "new_full")),
    *(getattr(torch, name) for name in ("is_complex", "is_floating_point", "is_same_size", "numel", "empty_like",
                                        "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")),
}  # fmt: skip

#: what hands out its values
_ITS_VALUES: set[Any] = {Tensor.detach, Tensor.clone}

# as torch.distributed does for DTensor: else an optimizer on CUDA takes these parameters one by one
torch_optimizer._foreach_supported_types += [SplitParameter, OwnedTable]


def mark_split(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself, as a `SplitParameter` if its spec says that this rank holds a shard of it."""
    if spec_of(parameter).layout.shard_axes:
        parameter.__class__ = SplitParameter
    return parameter


def mark_owned(parameter: nn.Parameter) -> None:
    """A table has its values, and from now on rows of it that a rank does not own are found by lookups only."""
    parameter.__class__ = OwnedTable


def _refusal_of_table(parameter: OwnedTable, called: str) -> str:
    name, whole = spec_of(parameter).name, spec_of(parameter).shards[0].shape
    rows, all_rows = parameter.shape[0], whole[0]
    if not name:
        return (
            f"{called} was called with a copy of a table with owners (sparse=True), which has the {rows} rows of this "
            f"rank alone; the result would be wrong. Take the whole of it from colossus.checkpoint.full_state_dict("
            f"model, context), or let every rank hold it, with 'gather' or 'dense' in parallel.strategy.ways"
        )
    return (
        f"table {name!r} (sparse=True): {called} was called with the parameter itself, of which this rank holds the "
        f"{rows} of {all_rows} rows that it owns; the result would be wrong. Look rows up by their ids; or let every "
        f"rank hold the whole table, with parallel.strategy.ways = {{{name!r}: 'gather'}} (or 'dense'). For a log or "
        f"an export colossus.checkpoint.full_state_dict(model, context) has the whole of it"
    )


def _refusal(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    parameter = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, SplitParameter))
    spec = spec_of(parameter)
    name = getattr(func, "__name__", str(func))
    part = " x ".join(map(str, parameter.shape))
    return (
        f"{spec.name or 'parameter'} ({spec.description}): {name} was called with the parameter itself, of which this "
        f"rank holds {part}, stored as {spec.layout}; the result would be wrong. "
        f"{_CALL_THE_BLOCK if spec.layout.stored else _remedy(func)}"
    )


def _remedy(func: Callable[..., Any]) -> str:
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
