"""Heads of an attention written by hand: from features to heads and back, also where a rank holds some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.arithmetic import either, nearest_multiples, not_a_multiple
from colossus.error_place import located_error
from colossus.layers.model_parallel import ModelParallel
from colossus.layers.pointwise import is_pointwise
from colossus.layers.sharded import PASSED_ON, ShardedActivation, SplitTensor, unwrap, wrap
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.layout.redistribute import redistribute


class SplitHeads(SplitTensor):
    """A rank's heads, [batch, heads / ranks, tokens, head_dim]: what `split_heads` gives of split features.

    What works on each head alone keeps it: attention, products of two of them, functions along the last two dims,
    element-by-element functions, also with plain tensors that have neither heads nor samples and want no gradient.

    Attributes:
        activation: how the features were split that became heads.
        return_layout: as of `ShardedActivation`.
        num_heads: of all ranks.
    """

    activation: Activation
    return_layout: Activation
    parallel: ModelParallel
    num_heads: int

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        is_transpose = func == _MT
        with torch._C.DisableTorchFunctionSubclass():
            if func in PASSED_ON or (name == "__get__" and func not in _RESHAPING):
                return func(*args, **kwargs)
            operands = list(_tensors((*args, *kwargs.values())))
            first = next(operand for operand in operands if isinstance(operand, SplitHeads))
            if func is F.scaled_dot_product_attention:
                return first._attend(*args, **kwargs)
            if not is_transpose and func not in _MATRIX_PRODUCTS and not is_pointwise(func, args, kwargs):
                first._check_dims(name, _dims_of(func, args, kwargs))
            for operand in operands:
                first._check_operand(name, operand, split_only=func in _MATRIX_PRODUCTS)
            out = func(*args, **kwargs)
            if isinstance(out, Tensor):
                return first._like(name, out)
            return type(out)(first._like(name, each) for each in out)

    def take_apart(self) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        how = self.activation, self.return_layout, self.parallel, self.num_heads
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor), lambda x: _mark(x, *how)

    def _like(self, name: str, x: Tensor) -> Tensor:
        if x.shape[:-2] != self.shape[:-2]:
            raise located_error(self._refusal(name))
        return _mark(x, self.activation, self.return_layout, self.parallel, self.num_heads)

    def _check_dims(self, name: str, dims: tuple[Any, ...]) -> None:
        """That a function works along the last two dims only: tokens and head_dim, which a rank has whole."""
        last = (-1, -2, self.dim() - 1, self.dim() - 2)
        if not dims or any(dim not in last for dim in dims):
            raise located_error(self._refusal(name))

    def _check_operand(self, name: str, x: Tensor, *, split_only: bool) -> None:
        if isinstance(x, SplitHeads):
            if (x.activation, x.num_heads) != (self.activation, self.num_heads):
                raise located_error(
                    f"{name}: one operand has {self.num_heads} heads ({self.activation}), the other {x.num_heads} "
                    f"({x.activation}): split both into as many, split_heads(x, {self.num_heads}), or repeat what has "
                    f"fewer before it is split (in scaled_dot_product_attention, enable_gqa=True)"
                )
        elif split_only or isinstance(x, SplitTensor) or x.requires_grad or any(size > 1 for size in x.shape[:-2]):
            raise located_error(
                f"{name}: a tensor of shape {tuple(x.shape)} meets {self.shape[-3]} of {self.num_heads} heads "
                f"({self.activation}). Beside them may stand what has no gradient and no dims before the last two: the "
                f"rest belongs before colossus.layers.split_heads or behind merge_heads"
            )

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        name = "scaled_dot_product_attention"
        for x in (query, key, value):
            if not isinstance(x, SplitHeads) or x.activation != self.activation:
                raise located_error(f"{name}: query, key and value must all come from colossus.layers.split_heads")
        if dropout_p:
            raise located_error(
                f"{name}: dropout_p = {dropout_p} would drop the same of the heads of every rank; put "
                f"colossus.layers.Dropout behind merge_heads, or use colossus.layers.Attention(dropout=...)"
            )
        if attn_mask is not None and not isinstance(attn_mask, SplitHeads):
            axes = self.activation.batch, self.parallel.regions.whole.batch
            here, user = (self.parallel.context.size(each) if each else 1 for each in axes)
            attn_mask = local_mask(attn_mask, query.shape[0] * here // user, self.activation, self.parallel)
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        assert isinstance(query, SplitHeads)
        return _mark(out, self.activation, self.return_layout, self.parallel, query.num_heads)

    def _refusal(self, name: str) -> str:
        return (
            f"{name} on {self.shape[-3]} of {self.num_heads} heads ({self.activation}; local shape "
            f"{tuple(self.shape)}) would give wrong values, or is not known to give right ones. Functions along the "
            f"last two dims, tokens and head_dim, are right; call colossus.layers.merge_heads(x) before anything else"
        )

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"SplitHeads({self.shape[-3]} of {self.num_heads} heads, local {tuple(self.shape)}, {self.activation})"


_MATRIX_PRODUCTS: set[Any] = {torch.matmul, Tensor.matmul, Tensor.__matmul__}
_RESHAPING: set[Any] = {getattr(Tensor, n).__get__ for n in ("T", "mT", "H", "mH", "data")}
_MT: Any = getattr(Tensor, "mT").__get__  # noqa: B009

#: functions along dims that are named: the position of the argument, behind the tensor, that names the first
_ALONG: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), (1,)),
    **dict.fromkeys((F.log_softmax, torch.log_softmax, Tensor.log_softmax), (1,)),
    **dict.fromkeys((torch.chunk, Tensor.chunk, torch.split, Tensor.split), (2,)),
    **dict.fromkeys((torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes), (1, 2)),
    **dict.fromkeys((torch.cat, torch.narrow, Tensor.narrow, torch.cumsum, Tensor.cumsum), (1,)),
    F.normalize: (2,),
    **dict.fromkeys((torch.sum, Tensor.sum, torch.mean, Tensor.mean, torch.amax, Tensor.amax), (1,)),
}  # fmt: skip


def _dims_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The dims along which a call works; empty when that is not known."""
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        is_plain = index[0] is Ellipsis and all(isinstance(each, slice) for each in index[1:])
        return tuple(range(-1, -len(index), -1)) if is_plain else ()
    positions = _ALONG.get(func, ())
    names = ("dim0", "dim1") if len(positions) == 2 else ("dim",)
    given = [args[at] if at < len(args) else kwargs.get(name) for at, name in zip(positions, names, strict=False)]
    return tuple(dim for each in given for dim in (each if isinstance(each, (tuple, list)) else (each,)))


def _tensors(values: Any) -> Any:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _mark(x: Tensor, activation: Activation, output: Activation, parallel: ModelParallel, num_heads: int) -> Tensor:
    out = x.as_subclass(SplitHeads)
    out.activation, out.return_layout, out.parallel, out.num_heads = activation, output, parallel, num_heads
    return out


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, .., tokens, heads * head_dim] -> [batch, .., heads, tokens, head_dim], for an attention of one's own.

    Of a plain tensor a plain tensor. Of features that are split, as ``Linear(split="column")`` leaves them, the rank's
    heads, `SplitHeads`: ``F.scaled_dot_product_attention`` takes them, with a mask in the whole layout.

    Args:
        heads: of all ranks; of keys and values it may be fewer than of queries (``enable_gqa=True``).

    Raises:
        ValueError: for heads that do not divide the features, or over the ranks; and where tokens are split.
    """
    parallel = x.parallel if isinstance(x, ShardedActivation) else None
    ways, activation = 1, Activation()
    if isinstance(x, ShardedActivation) and parallel is not None:
        activation = x.activation
        ways = parallel.context.size(activation.features) if activation.features else 1
        if activation.tokens:
            raise located_error(
                f"split_heads: tokens are split ({activation}), and an attention must see them all. Between blocks "
                f'colossus.layers.Linear(split="column") gathers them; under parallel.sequence use '
                f"colossus.layers.Attention, which passes keys and values between the ranks"
            )
        if x.num_features is not None:
            raise located_error(
                f"split_heads: these {x.num_features} features are padded, as a vocabulary is; no heads"
            )
    features = x.shape[-1] * ways
    if heads < 1 or features % heads:
        raise located_error(f"split_heads: {not_a_multiple('features', features, f'heads = {heads}', max(heads, 1))}")
    if heads % ways:
        raise located_error(
            f"split_heads: heads = {heads} does not divide over the {ways} ranks of {','.join(activation.features)}; "
            f"heads are split whole: take {either(nearest_multiples(heads, ways))}, or "
            f"colossus.layers.to_whole(x) first"
        )
    if x.dim() < 3:
        raise located_error(
            f"split_heads: x has shape {tuple(x.shape)}; it takes [batch, .., tokens, heads * head_dim]"
        )
    if parallel is None or not isinstance(x, ShardedActivation):
        return x.unflatten(-1, (heads, -1)).transpose(-3, -2)
    local, _, return_layout = unwrap(x, parallel)
    return _mark(local.unflatten(-1, (heads // ways, -1)).transpose(-3, -2), activation, return_layout, parallel, heads)


def merge_heads(x: Tensor) -> Tensor:
    """[batch, .., heads, tokens, head_dim] -> [batch, .., tokens, heads * head_dim], the inverse of `split_heads`.

    Of a rank's heads it gives split features, which ``Linear(split="row")`` takes.
    """
    if isinstance(x, ShardedActivation):
        raise located_error(f"merge_heads takes what colossus.layers.split_heads gave; this is split by {x.activation}")
    if x.dim() < 4:
        raise located_error(f"merge_heads: x has shape {tuple(x.shape)}; it takes [batch, .., heads, tokens, head_dim]")
    if not isinstance(x, SplitHeads):
        return x.transpose(-3, -2).flatten(-2)
    with torch._C.DisableTorchFunctionSubclass():
        merged = x.as_subclass(Tensor).transpose(-3, -2).flatten(-2)
    return wrap(merged, x.activation, x.return_layout, x.parallel)


def local_mask(mask: Tensor, batch: int, activation: Activation, parallel: ModelParallel) -> Tensor:
    """The mask [batch, heads, tokens, tokens] of the samples and heads that this rank computes.

    Where it is broadcast over samples or heads, its gradient, if any, is summed over the ranks that split them.

    Args:
        mask: its batch in the whole layout, with all heads and tokens.
        batch: samples in the whole layout.
        activation: how samples and heads are split here.
    """
    user = parallel.regions.whole
    dims = mask.dim()
    by_sample = dims > 3 and mask.shape[0] == batch
    by_head = dims > 2 and mask.shape[-3] > 1
    user_dims: list[tuple[str, ...]] = [()] * dims
    inner_dims: list[tuple[str, ...]] = [()] * dims
    user_partial, inner_partial = user.batch, activation.batch
    if by_sample:
        user_dims[0], inner_dims[0], user_partial, inner_partial = user.batch, activation.batch, (), ()
    if by_head:
        inner_dims[-3] = activation.features
    else:
        inner_partial += activation.features
    source, target = Layout(tuple(user_dims), (), user_partial), Layout(tuple(inner_dims), (), inner_partial)
    return redistribute(mask, source, target, parallel.context)
