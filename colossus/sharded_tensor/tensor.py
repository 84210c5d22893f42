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

from colossus.error_place import located_error
from colossus.layout.operators import (
    LIKE_FIRST,
    PASSED_ON,
    SIZES,
    Call,
    aten_name,
    bind,
    is_made_fake,
    is_pointwise,
    tensors_of,
)
from colossus.sharded_tensor.local_operands import each_its_own, local_operand, wants_sum
from colossus.sharded_tensor.multi_head import multi_head_attention_forward
from colossus.sharded_tensor.placement import ROLES, MixesPartsError, Place, Placement, shared_base
from colossus.sharded_tensor.rules import RANDOM, RULES, refusal
from colossus.sharded_tensor.sizes import RESIZES, resized, shape_of
from colossus.sharded_tensor.user_backward import (
    has_made,
    note_made,
    runs_user_backward,
    split_gradients_of_made,
    split_hook,
)
from colossus.sharded_tensor.view_rules import SplitRole, aligned

_WHOLE = (Tensor, torch.nn.Parameter, FakeTensor)


class ShardedTensor(Tensor):
    """A rank's part of a tensor that ranks share.

    It has a part of the tokens under ``parallel.sequence``, and of features, heads, tokens or samples between blocks
    and inside of a column/row pair.

    Its data are the rank's. Its ``shape`` and all sizes are those of the whole tensor, with the samples of a data rank.
    Functions that work on each part by itself return another one: element-by-element functions, views, products and
    reductions along dims that are not split, and views that make features heads. Functions that combine parts raise,
    since a rank has one of them. Over the tokens that sequence ranks split, reductions, products, attention and the
    choice of a token communicate.

    A plain tensor in the same call is whole, on all ranks that share the part. It may be broadcast over the split dim,
    or have all of it: then each rank takes its part. Its gradient is gathered and summed, so a parameter of the user's
    own is right there.

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
        if name == "multi_head_attention_forward":
            return multi_head_attention_forward(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if name == "__get__":
                return _property(func, args)
            if name in SIZES and isinstance(args[0], ShardedTensor) and not is_made_fake():
                return SIZES[name](shape_of(args[0]), *args[1:], **kwargs)
            if has_made():
                split_gradients_of_made(mark)
            if name in PASSED_ON or (name in LIKE_FIRST and not isinstance(args[0], ShardedTensor)):
                return func(*args, **kwargs)
            if len(types) > 1 and any(kind not in _WHOLE and not issubclass(kind, ShardedTensor) for kind in types):
                return NotImplemented  # the parameter decides: it knows which operands it takes
            if name == "register_hook":
                return func(args[0], split_hook(args[1], args[0].placement, mark))
            if name == "__format__":
                return repr(args[0])
            is_elementwise = is_pointwise(func, args, kwargs)
            placement = _common_placement(args, kwargs) if is_elementwise else None
            if placement is None:
                try:
                    out, placement = _followed(name, func, args, kwargs, is_elementwise)
                except MixesPartsError as error:
                    first = next(x for x in tensors_of((args, kwargs)) if isinstance(x, ShardedTensor))
                    if runs_user_backward() and first.placement.is_whole:  # its sums are those of a rank's part
                        return func(*_plain(args), **_plain(kwargs))
                    raise located_error(refusal(name, error, first)) from None
            else:
                out = func(*args, **kwargs)
            if not torch.is_grad_enabled() and any(x.requires_grad for x in tensors_of((args, kwargs))):
                note_made(out)
        if placement is None:
            return out
        if isinstance(out, (tuple, list)):
            for x in out:
                _mark(x, placement)
            return out
        return _mark(out, placement)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"ShardedTensor(local {tuple(self.shape)}, {self.placement})"


# --- in and out


def wrap(x: Tensor, placement: Placement | None) -> Tensor:
    """Mark a layer's result, in place, with its placement; leave it plain where no dim is split.

    An alias, as `mark` makes one, would be one more operation in forward and in backward.
    """
    if placement is None or (not placement.places and placement.activation == placement.parallel.regions.whole):
        return x
    if torch.compiler.is_compiling():
        return mark(x, placement)
    x.__class__ = ShardedTensor
    x.placement = placement  # type: ignore[attr-defined]
    return x


def mark(x: Tensor, placement: Placement) -> Tensor:
    """Return an alias of a tensor that has this placement."""
    out = x.as_subclass(ShardedTensor)
    out.placement = placement
    return out


def plain(x: Tensor) -> Tensor:
    """Return a rank's part as a plain tensor, however it is split."""
    if not isinstance(x, ShardedTensor):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        if has_made():
            split_gradients_of_made(mark)
        if torch.compiler.is_compiling():  # knows no `as_subclass` of a type of ours
            return torch.ops.aten.alias.default(x)
        return x.as_subclass(Tensor)


def plain_of_graph(x: Tensor) -> Tensor:
    """Return `plain(x)`; a compiler ends its graph here, since the next graph cannot take a `ShardedTensor`."""
    if not isinstance(x, ShardedTensor):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


# --- one call


def _common_placement(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Placement | None:
    """Return the placement that all tensors of an element-by-element function share, or None."""
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


def _followed(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], is_elementwise: bool
) -> tuple[Any, Placement | None]:
    """Return the result of a function on a rank's parts, and its placement; None for a plain result.

    Raises:
        MixesPartsError: the function would be wrong on parts, or is not known to be right.
    """
    args, kwargs = each_its_own(args, kwargs)
    tensors = tensors_of((args, kwargs))
    operands = [x for x in tensors if isinstance(x, ShardedTensor)]
    base = shared_base([x.placement for x in operands])
    call = _bound(name, func, args, kwargs)
    is_in_place = (name[-1:] == "_" and name[:2] != "__") or (name[:3] == "__i" and aten_name(name) != name)
    if is_in_place and not isinstance(args[0], ShardedTensor):
        raise MixesPartsError("writes a split tensor into a plain one, which is whole")
    if isinstance(kwargs.get("out"), Tensor):
        raise MixesPartsError("writes into a tensor (out=): take what it returns")
    if call.name in RESIZES:
        if is_in_place:
            raise MixesPartsError("changes the dims of a tensor in place: take what it returns")
        x = call.get("self")
        if isinstance(x, ShardedTensor):
            return resized(call, x, x.placement)
        return getattr(x, call.name.removesuffix("_as"))(shape_of(operands[0])), None
    if call.name in RANDOM:
        if base.split_axes and call.get("p", default=1) and call.get("training", "train", default=True):
            raise MixesPartsError("draws the same numbers for the parts of all tensor ranks")
        return func(*args, **kwargs), base
    if base.split_axes and not torch.is_grad_enabled() and any(x.requires_grad for x in operands):  # noqa: SIM102
        if any(x.requires_grad for x in tensors if not isinstance(x, ShardedTensor)):
            raise MixesPartsError(
                "meets a parameter inside of an autograd function: its gradient would lack the parts of other ranks"
            )
    places: list[tuple[str, Place]] = []
    asked: list[SplitRole] = []
    for name_of_role in ROLES:
        if not any(x.placement.place(name_of_role) for x in operands):
            continue
        role = SplitRole(name_of_role, base)
        if is_elementwise:
            leaves = [args[0]] if name in LIKE_FIRST else [*args, *kwargs.values()]
            place: Place | None = aligned(role, leaves)
            if place is not None:
                place = place.at(place.dim + max(x.dim() for x in tensors_of(leaves)))
        else:
            place = _ruled(call, role)
        if place is not None:
            places.append((name_of_role, place))
        asked.append(role)
    changed = [x for role in asked for x in (*role.gathered, *(entry[0] for entry in role.sliced))]
    if is_in_place and any(x is args[0] for x in changed):
        raise MixesPartsError("writes into a tensor of which it would need other tokens: take what it returns")
    placement = replace(base, places=tuple(places), standard_ndim=0)
    if changed or (base.split_axes and any(wants_sum(x) for x in tensors)):
        on_meta = any(x.is_meta for x in operands)
        args, kwargs = tree_map_only(Tensor, lambda x: local_operand(x, base, asked, on_meta), (args, kwargs))
    instead = next((role.instead for role in asked if role.instead), None)
    if instead is not None:
        args, kwargs = _plain(args), _plain(kwargs)
        out = instead(_bound(name, func, args, kwargs))
    else:  # torch deep-copies only tensors of its own types
        out = func(*args, **kwargs) if name != "__deepcopy__" else func(*_plain(args), **kwargs)
    return out, placement if places else None


def _bound(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    if name == "__getitem__":
        return Call("getitem", {"self": args[0], "index": args[1]}, None)
    if name == "__setitem__":
        return Call("setitem", {"self": args[0]}, None)
    if name == "einsum":
        return Call(name, {"args": args}, None)
    return bind(func, args, kwargs)


def _ruled(call: Call, role: SplitRole) -> Place | None:
    """Return the place of a role in the result, by its rule; its dim may count from the right."""
    rule = RULES.get(call.name) or (RULES["norm"] if call.is_reduction else None)
    try:
        if rule is None:
            raise MixesPartsError("is not known to work on each part by itself")
        return rule(role, call)
    except MixesPartsError:
        split = [x for x in tensors_of(call.arguments.values()) if role.place(x) is not None]
        if role.is_contiguous or not split or any(x.is_floating_point() for x in split):
            raise
        role.sliced, role.instead = [], None
        for x in split:  # ids, positions and masks are small
            role.gather(x)
        return None
    except (TypeError, ValueError, AttributeError) as error:
        raise MixesPartsError(f"has arguments that are not understood ({error})") from None


def _mark(x: Any, placement: Placement) -> Any:
    """Mark a result in place: a view of it would cost an operation, in backward, too."""
    if isinstance(x, Tensor):
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


def _as_gradient(x: ShardedTensor) -> Any:
    """Return an argument of backward: the edge of a tensor in the graph, or a gradient as a plain local tensor."""
    return get_gradient_edge(x) if x.requires_grad else plain(x)


def _property(func: Any, args: tuple[Any, ...]) -> Any:
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    x = args[0]
    if name == "shape":
        return x.shape if is_made_fake() else shape_of(x)
    if name in ("T", "H", "data"):
        what = "reverses all dims" if name != "data" else "leaves autograd behind"
        raise located_error(refusal(f"x.{name}", MixesPartsError(what), x))
    out = func(*args)
    if not isinstance(out, Tensor) or name == "_base":
        return out
    if name in ("mT", "mH"):
        _, placement = _followed("transpose", Tensor.transpose, (x, -2, -1), {}, False)
        return _mark(out, placement or x.placement)
    return _mark(out, x.placement)
