"""A rank's part of a tensor, as a type on which torch's functions are right or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_map_only

from colossus.comm.conjugate import conjugate
from colossus.error_place import located_error
from colossus.layout.operators import LIKE_FIRST, PASSED_ON, Call, aten_name, bind, is_pointwise, tensors_of
from colossus.sharded_tensor.placement import ROLES, MixesPartsError, Place, Placement, local_mask
from colossus.sharded_tensor.rules import RANDOM, RULES, refusal
from colossus.sharded_tensor.user_backward import (
    has_made,
    note_made,
    runs_user_backward,
    split_gradients_of_made,
    split_hook,
)
from colossus.sharded_tensor.view_rules import At, aligned

_WHOLE = (Tensor, torch.nn.Parameter, FakeTensor)


class ShardedTensor(Tensor):
    """A rank's part of a tensor that ranks share: of the tokens under ``parallel.sequence``, and of features, heads,
    tokens or samples between blocks and inside of a column/row pair.

    Its data and its ``shape`` are the rank's. What works on each part by itself keeps it: element-by-element functions,
    views, products and reductions along dims that are not split. What brings parts together raises, since a rank has
    one of them. Features become heads by ``view(.., -1, head_dim)``, the number of heads left open.

    A plain tensor beside it is whole, on all ranks that share the part. It may be broadcast over the split dim; its
    gradient is summed over the ranks that split it, so a parameter of the user's own is right there.

    Attributes:
        placement: which dims are split, over which axes.
    """

    placement: Placement

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch.autograd.backward:  # of reentrant checkpointing: it runs forwards again
            args, kwargs = tree_map_only(ShardedTensor, _as_gradient, (args, kwargs))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if name == "__get__":
                return _property(func, args)
            if has_made():
                split_gradients_of_made(mark)
            if name in PASSED_ON or (name in LIKE_FIRST and not isinstance(args[0], ShardedTensor)):
                return func(*args, **kwargs)
            if len(types) > 1 and any(each not in _WHOLE and not issubclass(each, ShardedTensor) for each in types):
                return NotImplemented  # a parameter that is split knows better what it may meet
            if name == "register_hook":
                return func(args[0], split_hook(args[1], args[0].placement, mark))
            if name == "__format__":
                return repr(args[0])
            is_elementwise = is_pointwise(func, args, kwargs)
            placement = _common_placement(args, kwargs) if is_elementwise else None
            if placement is None:
                tensors = tensors_of((args, kwargs))
                first = next(x for x in tensors if isinstance(x, ShardedTensor))
                try:
                    placement = _placement_of_result(name, func, args, kwargs, tensors, is_elementwise)
                except MixesPartsError as error:
                    if runs_user_backward() and first.placement.is_whole:  # its sums are those of a rank's part
                        return func(*_plain(args), **_plain(kwargs))
                    raise located_error(refusal(name, error, first)) from None
                if name == "scaled_dot_product_attention":
                    args, kwargs = _with_local_mask(args, kwargs, placement)
                elif placement.split_axes and any(_wants_sum(x) for x in tensors):
                    args, kwargs = tree_map_only(Tensor, lambda x: _summed_gradient(x, placement), (args, kwargs))
            # torch copies only what it has the type of
            out = func(*args, **kwargs) if name != "__deepcopy__" else func(*_plain(args), **kwargs)
            if not torch.is_grad_enabled() and any(x.requires_grad for x in tensors_of((args, kwargs))):
                note_made(out)
        if isinstance(out, (tuple, list)):
            for each in out:
                _mark(each, placement)
            return out
        return _mark(out, placement)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"ShardedTensor(local {tuple(self.shape)}, {self.placement})"


# --- in and out


def wrap(x: Tensor, placement: Placement | None) -> Tensor:
    """What a layer has computed, marked in place with how it is split; plain where nothing is. An alias, as of `mark`,
    would be an operation more in forward and in backward."""
    if placement is None or (not placement.places and placement.activation == placement.parallel.regions.whole):
        return x
    if torch.compiler.is_compiling():
        return mark(x, placement)
    x.__class__ = ShardedTensor
    x.placement = placement  # type: ignore[attr-defined]
    return x


def mark(x: Tensor, placement: Placement) -> Tensor:
    """A tensor that others hold too, as a tensor of its own that has this placement."""
    out = x.as_subclass(ShardedTensor)
    out.placement = placement
    return out


def placement_of(x: Any) -> Placement | None:
    """None of a plain tensor, and of anything else."""
    return x.placement if isinstance(x, ShardedTensor) else None


def plain(x: Tensor) -> Tensor:
    """A rank's part as a plain tensor, however it is split."""
    if not isinstance(x, ShardedTensor):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        if has_made():
            split_gradients_of_made(mark)
        if torch.compiler.is_compiling():  # knows no `as_subclass` of a type of ours
            return torch.ops.aten.alias.default(x)
        return x.as_subclass(Tensor)


def plain_of_graph(x: Tensor) -> Tensor:
    """`plain`, at which a compiler ends its graph: the next one gets a plain tensor, since none can get one of ours."""
    if not isinstance(x, ShardedTensor):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


# --- one call


def _common_placement(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Placement | None:
    """Of an element-by-element function whose tensors are all placed alike, as most are; else None."""
    if kwargs:
        return None
    placement, ndim = None, -1
    for x in args:
        if isinstance(x, ShardedTensor):
            if placement is None:
                placement, ndim = x.placement, x.dim()
            elif (x.placement is not placement and x.placement != placement) or x.dim() != ndim:
                return None
        elif isinstance(x, (Tensor, tuple, list)):
            return None
    return placement if isinstance(args[0], ShardedTensor) else None


def _placement_of_result(
    name: str,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Tensor],
    is_elementwise: bool,
) -> Placement:
    operands = [x for x in tensors if isinstance(x, ShardedTensor)]
    base = _base(name, operands)
    call = _bound(name, func, args, kwargs)
    is_in_place = (name[-1:] == "_" and name[:2] != "__") or (name[:3] == "__i" and aten_name(name) != name)
    if is_in_place and not isinstance(args[0], ShardedTensor):
        raise MixesPartsError("writes what is split into a plain tensor, which is whole")
    if isinstance(kwargs.get("out"), Tensor):
        raise MixesPartsError("writes into a tensor (out=): take what it returns")
    if call.name in RANDOM:
        if base.split_axes and call.get("p", default=1) and call.get("training", "train", default=True):
            raise MixesPartsError("draws the same numbers for the parts of all tensor ranks")
        return base
    if base.split_axes and not torch.is_grad_enabled() and any(x.requires_grad for x in operands):  # noqa: SIM102
        if any(x.requires_grad for x in tensors if not isinstance(x, ShardedTensor)):
            raise MixesPartsError(
                "meets a parameter inside of an autograd function: its gradient would lack the parts of other ranks"
            )
    is_of_loss = any(x.placement.is_of_loss for x in operands)
    places: list[tuple[str, Place]] = []
    for role in ROLES:
        if not any(x.placement.place(role) for x in operands):
            continue
        if is_elementwise:
            met = [args[0]] if name in LIKE_FIRST else [*args, *kwargs.values()]
            aligned_at = aligned(At(role), met)
            place: Place | None = aligned_at.at(aligned_at.dim + max(x.dim() for x in tensors_of(met)))
        else:
            place = _ruled(call, At(role, is_of_loss=is_of_loss))
        if place is not None:
            places.append((role, place))
    return replace(base, places=tuple(places), standard_ndim=0, is_of_loss=is_of_loss)


def _base(name: str, operands: list[ShardedTensor]) -> Placement:
    """The placement that says axes and regions; operands whose features, tokens or samples are split must agree."""
    split = [x.placement for x in operands if not x.placement.is_whole]
    for other in split[1:]:
        if other.activation != split[0].activation:
            raise MixesPartsError(
                f"brings together what is split as ({split[0].activation}) and what is split as ({other.activation}): "
                f"bring both to one layout with colossus.layers.to_whole or to_residual"
            )
    return split[0] if split else operands[0].placement


def _bound(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    if name == "__getitem__":
        return Call("getitem", {"self": args[0], "index": args[1]}, None)
    if name == "__setitem__":
        return Call("setitem", {"self": args[0]}, None)
    if name == "einsum":
        return Call(name, {"args": args}, None)
    return bind(func, args, kwargs)


def _ruled(call: Call, at: At) -> Place | None:
    """Return where the split dim of one role is in the result, if it is; from the right where the rule says it so."""
    rule = RULES.get(call.name) or (RULES["norm"] if call.is_reduction else None)
    if rule is None:
        raise MixesPartsError("is not known to work on each part by itself")
    try:
        return rule(at, call)
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise MixesPartsError(f"has arguments that are not understood ({error})") from None


def _mark(x: Any, placement: Placement) -> Any:
    """What a function gave, marked in place: a view of it would cost an operation, in backward, too."""
    if isinstance(x, Tensor) and (placement.places or not placement.is_of_loss):
        if any(place.dim < 0 for _, place in placement.places):
            ndim = _ndim(x)
            places = tuple((role, p if p.dim >= 0 else p.at(p.dim + ndim)) for role, p in placement.places)
            placement = replace(placement, places=places, standard_ndim=0)
        if torch.compiler.is_compiling():
            return mark(x, placement)
        if not isinstance(x, ShardedTensor):
            x.__class__ = ShardedTensor
        x.placement = placement  # type: ignore[attr-defined]
    return x


def _ndim(x: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return x.dim()


def _plain(nest: Any) -> Any:
    return tree_map_only(ShardedTensor, lambda x: x.as_subclass(Tensor), nest)


def _wants_sum(x: Tensor) -> bool:
    """Whether it is a plain tensor that gets a gradient: of what ranks split it is that of one part."""
    return not isinstance(x, ShardedTensor) and x.requires_grad and torch.is_grad_enabled()


def _summed_gradient(x: Tensor, placement: Placement) -> Tensor:
    """A plain tensor whose gradient is summed over the ranks that split what it meets."""
    if not _wants_sum(x) or x.is_meta:  # of a trial on the meta device, where no ranks are
        return x
    return conjugate(x, "identity", "sum", placement.parallel.context.group(placement.split_axes))


def _with_local_mask(
    args: tuple[Any, ...], kwargs: dict[str, Any], placement: Placement
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an attention, with the mask's samples and heads that this rank has."""
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    if mask is None or isinstance(mask, ShardedTensor) or not placement.split_axes:
        return args, kwargs
    here, whole = placement.activation.batch, placement.parallel.regions.whole.batch
    ways = [placement.parallel.context.size(axes) if axes else 1 for axes in (here, whole)]
    mask = local_mask(mask, args[0].shape[0] * ways[0] // ways[1], placement.activation, placement.parallel)
    return (*args[:3], mask, *args[4:]), {key: value for key, value in kwargs.items() if key != "attn_mask"}


def _as_gradient(x: ShardedTensor) -> Any:
    """What backward starts from: the edge of a tensor in the graph, or a gradient as a plain local tensor."""
    return get_gradient_edge(x) if x.requires_grad else plain(x)


def _property(func: Any, args: tuple[Any, ...]) -> Any:
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    x = args[0]
    if name in ("T", "H", "data"):
        what = "reverses all dims" if name != "data" else "leaves autograd behind"
        raise located_error(refusal(f"x.{name}", MixesPartsError(what), x))
    out = func(*args)
    if not isinstance(out, Tensor) or name == "_base":
        return out
    if name in ("mT", "mH"):
        return _mark(out, _placement_of_result("mT", Tensor.transpose, (x, -1, -2), {}, [x], False))
    return _mark(out, x.placement)
