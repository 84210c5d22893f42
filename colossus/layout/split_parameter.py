"""The type of a parameter of which a rank has a part, or nothing for now; it refuses to stand for the whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import get_gradient_edge
from torch.optim import optimizer as torch_optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from colossus.error_place import located_error
from colossus.layout.layout import Layout
from colossus.layout.operators import LIKE_FIRST, PASSED_ON, SIZES, is_made_fake
from colossus.layout.parameter import ParameterSpec, attach, spec_of
from colossus.layout.parameter_hooks import guard_hooks, guarded
from colossus.layout.part_rules import split_dims_of_result

Function = Callable[..., Any]

#: inside this block a `SplitParameter` is the plain tensor of the rank: for code that treats it as a shard, and where
#: the time of a step is spent (the type costs some microseconds at each access)
as_shards = torch._C.DisableTorchFunctionSubclass


#: the words for what this rank has of a parameter whose values no function may read: one whose memory is freed, and a
#: table for lookups (sparse=True)
FREED = "nothing while its block does not run: parallel.zero = 3 has freed it"
OWNED = "the rows that it owns"

_CALL_THE_BLOCK = (
    "A block is whole while it is called, as block(x): use its parameters inside its forward, and neither keep nor "
    "return them; or use parallel.zero = 2 or less, or parallel.tensor.weights = 'step'"
)
_CALL_THE_LAYER = (
    "Call the layer; a head with the weight of an embedding is colossus.layers.LMHead(hidden_size, vocab_size, "
    "tied_to=embedding). A penalty on weights belongs to the optimizer (weight_decay); numbers for a log come from "
    "colossus.checkpoint.full_state_dict(model, context). To use a parameter by hand, make it a torch.nn.Parameter, or "
    "part of a layer of torch.nn (under colossus.parallelize by the rule 'torch'), which every rank has whole; norms "
    "of gradients are those of train.clip_grad_norm"
)


class SplitParameter(nn.Parameter):
    """A parameter of which this rank has a shard, or ``hidden`` (see `hide_values`).

    Its shape and all sizes are those of the whole parameter. Our layers use the rank's shard. Any other function would
    compute with a smaller parameter, with other values on each rank: products raise, and so do functions that want its
    gradient. If its values are hidden, all functions raise that need more than its shape and kind.
    """

    hidden: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied: SplitParameter = super().__deepcopy__(memo)
        copied.hidden = self.hidden
        return attach(copied, spec_of(self))

    def __repr__(self) -> str:  # type: ignore[override]
        if self.hidden:
            return f"SplitParameter({spec_of(self).name}: this rank holds {self.hidden})"
        with as_shards():
            return super().__repr__()

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
        tell = _SIZES.get(func)
        if tell is not None and isinstance(args[0], SplitParameter) and not is_made_fake():
            return tell(spec_of(args[0]).whole_shape, *args[1:], **kwargs)
        if func in _ABOUT:
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs)
        if func in _BACKWARD:  # outside `as_shards`: under checkpointing this runs a user's forward
            wanted = kwargs.get("inputs", args[1] if len(args) > 1 and func is torch.autograd.grad else ())
            wanted = [wanted] if isinstance(wanted, Tensor) else wanted or ()
            for param in wanted:
                # a parameter that is cut for storage is not the tensor with which layers compute
                if isinstance(param, SplitParameter) and spec_of(param).layout.stored:
                    raise located_error(_refusal(param, func))
            args, kwargs = tree_map_only(SplitParameter, get_gradient_edge, (args, kwargs))
            out = func(*args, **kwargs)
            for param, gradient in zip(wanted, out or (), strict=False):
                if isinstance(param, SplitParameter):
                    _as_part(gradient, spec_of(param), _split_dims(param))
            return out
        if func in _HANDED_OUT and not (args[0].hidden and func == Tensor.detach):
            return _handed_out(func, args[0])
        leaves = tree_leaves((args, kwargs))
        hidden = [leaf for leaf in leaves if isinstance(leaf, SplitParameter) and leaf.hidden]
        is_of_its_shape = func in _OF_ITS_SHAPE and args[0] is args[1]
        if hidden and not is_of_its_shape:
            raise located_error(_refusal(hidden[0], func))
        if is_of_its_shape:
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs)
        return _checked(func, types, args, kwargs, leaves)


class ParameterPart(Tensor):
    """A tensor with this rank's part of the values of a parameter, of its gradient, or of a result computed from them.

    Functions that are right on each part by itself return such a tensor again (`part_rules`), all others raise.

    Attributes:
        spec: spec of the parameter.
        split_dims: the dims that ranks split, counted from the right.
    """

    spec: ParameterSpec
    split_dims: frozenset[int]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with as_shards():
            return _as_part(self.as_subclass(Tensor).__deepcopy__(memo), self.spec, self.split_dims)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor with the rank's part."""
        with as_shards():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        with as_shards():
            return f"ParameterPart({self.spec.name}, stored as {self.spec.layout}: {self.as_subclass(Tensor)!r})"

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT:
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs)
        if func in _HANDED_OUT:
            return _handed_out(func, args[0])
        return _checked(func, types, args, kwargs, tree_leaves((args, kwargs)))


def _split_dims(x: Any) -> frozenset[int]:
    """Return the dims of which a rank has a part, from the right."""
    if isinstance(x, ParameterPart):
        return x.split_dims
    return _split_dims_of(spec_of(x).layout)


@lru_cache(maxsize=256)
def _split_dims_of(layout: Layout) -> frozenset[int]:
    """Return the split dims of a parameter of this layout, from the right."""
    split = {dim - len(layout.dims) for dim, axes in enumerate(layout.dims) if axes}
    return frozenset(split | {-len(layout.dims)} if layout.stored else split)


def _as_part(x: Any, spec: ParameterSpec, split_dims: frozenset[int]) -> Any:
    """Mark plain tensors as parts, in place, and return them."""
    for leaf in tree_leaves(x):
        if type(leaf) is Tensor:
            leaf.__class__ = ParameterPart
            leaf.spec, leaf.split_dims = spec, split_dims  # type: ignore[attr-defined]
    return x


def _handed_out(getter: Function, x: Any) -> Any:
    """Return the values of a part, or its gradient, as an alias: the gradient itself stays plain for our code."""
    with as_shards():
        out, split_dims = getter(x), _split_dims(x)
        if type(out) is not Tensor or not split_dims or out.is_sparse:  # a sparse gradient has some rows of a table
            return out
        return _as_part(out.as_subclass(Tensor), _spec(x), split_dims)


def _checked(func: Function, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> Any:
    """Call a function with parts among its arguments, if it is right on each part by itself."""
    name = getattr(func, "__name__", "")
    # an operator, or a call with an output and no gradients, is of a compiled graph, whose layers were checked before
    is_of_graph = isinstance(func, OpOverload) or (kwargs.get("out") is not None and not torch.is_grad_enabled())
    if name in PASSED_ON:
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs)
    if name == "__get__":  # a compiler reads properties that are no tensors
        value = torch._C._disabled_torch_function_impl(func, types, args, kwargs)
        if not isinstance(value, Tensor):
            return value
    is_sent = str(getattr(func, "__module__", "")).startswith("torch.distributed.")  # a user's own collective of parts
    is_of_list = name.startswith(("_foreach_", "_fused_")) and not name.startswith(_FOREACH_REDUCTIONS)
    if is_of_graph or is_sent or is_of_list:
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs)
    parts = [leaf for leaf in leaves if isinstance(leaf, SplitParameter | ParameterPart)]
    if name in LIKE_FIRST and len(args) > 1 and args[1] is parts[-1]:  # it provides a device and a dtype
        return args[0].to(parts[-1].device, parts[-1].dtype, *args[2:], **kwargs)
    with as_shards():
        split = split_dims_of_result(func, args, kwargs, [(part, _split_dims(part)) for part in parts])
        if split is None or not _PLAIN.issuperset(types):
            raise located_error(_refusal(parts[0], func))
        try:
            out = func(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            if name.rstrip("_") + "_" == name and torch.is_grad_enabled():
                raise  # in place where gradients are wanted: torch's own error
            raise located_error(_refusal(parts[0], func)) from error
        # only its layer may use a parameter: a result computed by hand would train with only a part of it
        by_hand = [part for part in parts if isinstance(part, SplitParameter)] if func != Tensor.clone else []
        inputs = {id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        new = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and id(leaf) not in inputs]
        if by_hand and any(leaf.requires_grad for leaf in new):
            raise located_error(_refusal(by_hand[0], func))
        return _as_part(out, _spec(parts[0]), split)


def _spec(part: Any) -> ParameterSpec:
    return part.spec if isinstance(part, ParameterPart) else spec_of(part)


def local_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of this rank's part of a parameter."""
    with as_shards():
        return parameter.shape


def mark_split(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter itself, made a `SplitParameter` if this rank holds a shard of it."""
    if spec_of(parameter).layout.shard_axes:
        parameter.__class__ = SplitParameter
        guard_hooks(parameter)
    return parameter


def hide_values(parameter: nn.Parameter, hidden: str) -> type[nn.Parameter]:
    """Refuse functions the values of a parameter in the words ``hidden``, and return the type that it had."""
    kind = type(parameter)
    parameter.__class__ = SplitParameter
    parameter.hidden = hidden  # type: ignore[attr-defined]
    return kind


def show_values(parameter: nn.Parameter, kind: type[nn.Parameter]) -> None:
    """Undo `hide_values`, which returned ``kind``."""
    vars(parameter).pop("hidden", None)
    parameter.__class__ = kind


def _refusal(parameter: SplitParameter | ParameterPart, func: Function) -> str:
    spec, hidden = _spec(parameter), getattr(parameter, "hidden", "")
    with as_shards():
        local = hidden or f"{' x '.join(map(str, parameter.shape))}, stored as {spec.layout}"
    remedy = _CALL_THE_BLOCK if spec.layout.stored or local == FREED else _CALL_THE_LAYER
    of_it = "" if isinstance(parameter, SplitParameter) else ", its gradient or what is computed of them"
    if local == OWNED:
        local = f"the {local_shape(parameter)[0]} of {spec.shards[0].shape[0]} rows that it owns"
        remedy = (
            f"Look rows up by their ids, in the model itself (a copy of it finds none); or let every rank hold the "
            f"whole table, with parallel.strategy.ways = {{{spec.name!r}: 'gather'}} (or 'dense'). For a log or an "
            f"export colossus.checkpoint.full_state_dict(model, context) has the whole of it"
        )
    getter = getattr(func, "__self__", func)  # of a property, whose own name is __get__
    name = getattr(getter if func.__name__ == "__get__" else func, "__name__", func)
    return (
        f"{spec.name or 'parameter'} ({spec.description}): {name} was called with the "
        f"parameter itself{of_it}, of which this rank holds {local}; the result would be wrong. {remedy}"
    )


_BACKWARD: set[Any] = {torch.autograd.backward, torch.autograd.grad}

#: called with a tensor and itself, these return its node in the graph
_OF_ITS_SHAPE: set[Any] = {Tensor.view_as, Tensor.expand_as}

#: what tells sizes, which are those of the whole parameter
_SIZES: dict[Any, Function] = {
    getattr(Tensor, "shape").__get__: lambda shape: shape,  # noqa: B009
    torch.numel: SIZES["numel"],
    **{getattr(Tensor, name): tell for name, tell in SIZES.items()},
}

#: functions that only read or set a property of a tensor, or make others of its shape or kind
_ABOUT: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "is_meta", "layout", "ndim",
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

#: functions that return its values, or its gradient
_HANDED_OUT: set[Any] = {*(getattr(Tensor, name).__get__ for name in ("data", "grad")), Tensor.detach}

#: functions of lists of tensors that do not work element by element
_FOREACH_REDUCTIONS = ("_foreach_norm", "_foreach_max", "_foreach_powsum")

#: types that parts may meet
_PLAIN = {Tensor, nn.Parameter, nn.Buffer, FakeTensor, SplitParameter, ParameterPart}

# torch.distributed does this for DTensor: else an optimizer on CUDA takes these parameters one by one
torch_optimizer._foreach_supported_types += [SplitParameter, ParameterPart]
