"""Tensors of which a rank holds a part of the tokens, as a type that refuses what would be wrong on a part."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter, tree_map_only

from colossus.error_place import located_error
from colossus.layers.pointwise import is_pointwise
from colossus.layers.token_dim import MixedTokensError, TokenDim, aligned, found, tokens_of
from colossus.layers.token_rules import RULES


class SplitTokens(Tensor):
    """A tensor of the whole region under ``parallel.sequence``: the rank's part of the tokens, in one of its dims.

    What works on each token by itself keeps it, through views, transposes and products with plain matrices; what
    brings tokens together raises, since a rank has some of them only. A plain tensor beside it is whole.

    Attributes:
        token_dim: the dim that holds the tokens.
        num_ranks: over which the tokens are split.
    """

    token_dim: TokenDim
    num_ranks: int

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name == "__get__":
                return _property(func, args)
            if name in _PASSED_ON or (name in _LIKE_FIRST and type(args[0]) is not cls):
                return func(*args, **kwargs)
            if len(types) > 1 and any(each not in (cls, *_WHOLE) for each in types):
                return NotImplemented  # an activation whose features are split knows better what it may meet
            if name == "register_hook":
                return func(args[0], _split_hook(args[1], args[0]))
            if name == "__format__":
                return repr(args[0])
            first = next((x for x in args if type(x) is cls), None)
            if first is None:
                first = next(x for x in tree_iter((args, kwargs)) if type(x) is cls)
            try:
                at = _token_dim(name, func, args, kwargs)
            except MixedTokensError as error:
                if torch._C._current_graph_task_id() != -1 and not _hooks.are_running:
                    # the backward of a user's own autograd function: its sums are those of a rank's part
                    return func(*_plain(args), **_plain(kwargs))
                raise located_error(_refusal(name, error, first)) from None
            # torch copies only what it has the type of
            out = func(*args, **kwargs) if name != "__deepcopy__" else func(*_plain(args), **kwargs)
        if isinstance(out, (tuple, list)):
            for each in out:
                _mark(each, at, first.num_ranks)
            return out
        return _mark(out, at, first.num_ranks)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            shape = tuple(self.shape)
        return f"SplitTokens(local {shape}, tokens in dim {self.token_dim.dim}, over {self.num_ranks} ranks)"


def local(x: Tensor) -> Tensor:
    """The rank's part of a tensor as a plain one, for code that takes care itself that it has some tokens only.

    Anything may be done with it: nothing is refused any more, neither here nor in what is computed from it. A tensor
    that holds no tokens, and any tensor without ``parallel.sequence``, is returned as it is.

    Shape:
        [batch, tokens / ranks, ..] -> the same; which tokens they are says `colossus.sequence_parallel`.

    Raises:
        ValueError: for an activation whose features are split: ``to_whole(x)`` comes first.
    """
    if not isinstance(x, SplitTokens):
        if tokens_of(x) is not None:
            raise located_error(f"local: {x!r} has split features, too: call colossus.layers.to_whole(x) first")
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def with_tokens(x: Tensor, token_dim: TokenDim | None, num_ranks: int) -> Tensor:
    """A plain tensor marked as holding a rank's part of the tokens; as it is where it holds none."""
    return x if token_dim is None else _mark(x.as_subclass(SplitTokens), token_dim, num_ranks)


def _mark(x: Any, at: TokenDim, num_ranks: int) -> Any:
    if isinstance(x, Tensor):
        if not isinstance(x, SplitTokens):  # just made: a view of it would cost an operation, in backward, too
            x.__class__ = SplitTokens
        assert isinstance(x, SplitTokens)
        x.token_dim = at if at.dim >= 0 else at.at(at.dim + len(_shape(x)))
        x.num_ranks = num_ranks
    return x


class Titled(Protocol):
    """A layer. Its title is asked for where an error names it: a compiler that traces a forward which reads it makes a
    graph for each name, and none for the layers beyond its limit of 8."""

    @property
    def title(self) -> str: ...


def require_features_last(x: Tensor, layer: Titled | str, count: int = 1) -> TokenDim | None:
    """`tokens_of` x for a layer that takes features in the last ``count`` dims: no tokens.

    Args:
        layer: or how an error names it.
    """
    token_dim = tokens_of(x)
    if token_dim is not None and token_dim.dim >= len(_shape(x)) - count:
        _refuse_place(x, token_dim, layer, f"features in the last {count} dims" if count > 1 else "features last")
    return token_dim


def require_sequences(x: Tensor, layer: Titled | str) -> TokenDim | None:
    """`tokens_of` x for a layer that takes [batch, tokens, features]."""
    token_dim = tokens_of(x)
    if token_dim is not None and token_dim != TokenDim(len(_shape(x)) - 2):
        _refuse_place(x, token_dim, layer, "[batch, tokens, features]")
    return token_dim


def _refuse_place(x: Tensor, token_dim: TokenDim, layer: Titled | str, takes: str) -> None:
    title = layer if isinstance(layer, str) else layer.title
    flattened = ", flattened with others" if token_dim[1:] != (1, 1) else ""
    raise located_error(
        f"{title} takes {takes}, but its input of local shape {tuple(_shape(x))} has tokens in dim "
        f"{token_dim.dim}{flattened}"
    )


class _Hooks(threading.local):
    """Whether a hook of a user's runs in backward: it is refused what a forward is."""

    are_running = False


_hooks = _Hooks()


def _split_hook(hook: Callable[[Tensor], Tensor | None], x: Any) -> Callable[[Tensor], Tensor | None]:
    """The hook, given a gradient that holds tokens where x does."""
    at, num_ranks = x.token_dim, x.num_ranks

    def split_hook(grad: Tensor) -> Tensor | None:
        _hooks.are_running = True
        try:
            changed = hook(with_tokens(grad, at, num_ranks))
        finally:
            _hooks.are_running = False
        return None if changed is None else local(changed)

    return split_hook


def _shape(x: Tensor) -> torch.Size:
    with torch._C.DisableTorchFunctionSubclass():
        return x.shape


def _plain(nest: Any) -> Any:
    return tree_map_only(SplitTokens, lambda x: x.as_subclass(Tensor), nest)


def _property(func: Any, args: tuple[Any, ...]) -> Any:
    x, out = args[0], func(*args)
    if not isinstance(out, Tensor) or func == _BASE:
        return out
    at = x.token_dim
    if func in _TRANSPOSED:
        at = RULES["transpose"](x)
    elif func in _REVERSED:
        at = at.at(x.dim() - 1 - at.dim)
    return _mark(out, at, x.num_ranks)


def _token_dim(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TokenDim:
    """Where the tokens of the result are."""
    if (name[-1:] == "_" and name[:2] != "__") or name in _WRITING:
        if tokens_of(args[0]) is None:
            raise MixedTokensError("writes tokens, of which a rank has a part, into a plain tensor, which is whole")
        name = name if name[:2] == "__" else name.rstrip("_")
    if isinstance(kwargs.get("out"), Tensor):
        raise MixedTokensError("writes into a tensor (out=)", "Take what it returns")
    rule = RULES.get(name)
    try:
        if rule is not None:
            return rule(*args, **kwargs)
    except (TypeError, ValueError, IndexError) as error:
        func(*_plain(args), **_plain(kwargs))  # says better what is wrong, if it is
        raise MixedTokensError(f"has arguments that are not understood ({error})", "") from None
    if name in _LIKE_FIRST:
        return found(args[0])
    if is_pointwise(func, args, kwargs):
        return aligned([*args, *kwargs.values()])
    raise MixedTokensError("is not known to work on each token by itself")


def _refusal(name: str, error: MixedTokensError, x: SplitTokens) -> str:
    remedy = f" {error.remedy}." if error.remedy else ""
    return (
        f"{_SPOKEN.get(name, name)} {error}. parallel.sequence gives each of "
        f"{x.num_ranks} ranks a part of the tokens (local shape {tuple(x.shape)}, tokens in dim {x.token_dim.dim}), so "
        f"it would be wrong in silence.{remedy} colossus.layers.local(x) gives the rank's part as a plain tensor, for "
        f"code that takes care of it itself"
    )


_SPOKEN = {"__getitem__": "indexing", "__setitem__": "assigning by index", "__matmul__": "@", "__rmatmul__": "@"}
_WRITING = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow",
                                                         "and", "or", "xor", "lshift", "rshift"))}  # fmt: skip
#: their second argument, if it is a tensor, says a dtype or a device
_LIKE_FIRST = {"to", "type_as"}
#: what says something about a tensor, or makes a plain one
_PASSED_ON = {
    "dim", "size", "ndimension", "numel", "nelement", "element_size", "is_contiguous", "stride", "is_floating_point",
    "is_complex", "is_signed", "is_tensor", "is_inference", "is_conj", "is_neg", "is_shared", "is_pinned", "get_device",
    "retain_grad", "requires_grad_", "data_ptr", "storage_offset", "untyped_storage", "__len__", "__hash__", "__set__",
    "__delete__", "__dir__", "__reduce_ex__", "backward", "as_subclass", "result_type", "is_same_size", "_is_view",
    "register_post_accumulate_grad_hook", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new",
}  # fmt: skip
_WHOLE = (Tensor, torch.nn.Parameter, FakeTensor)
_BASE: Any = getattr(Tensor, "_base").__get__  # noqa: B009
_TRANSPOSED: set[Any] = {getattr(Tensor, name).__get__ for name in ("mT", "mH")}
_REVERSED: set[Any] = {getattr(Tensor, name).__get__ for name in ("T", "H")}
