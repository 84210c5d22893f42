"""Activations of which a rank holds a shard, as a tensor type that refuses what would be wrong on a shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only

from colossus.comm.conjugate import conjugate
from colossus.context.parallel_context import ParallelContext, current_context
from colossus.error_place import located_error
from colossus.layers.model_parallel import ModelParallel, model_parallel_of
from colossus.layers.pointwise import is_pointwise
from colossus.layers.token_dim import TokenDim, tokens_of
from colossus.layers.tokens import local, with_tokens
from colossus.layout.activation import Activation
from colossus.layout.moves import moves


class SplitTensor(Tensor):
    """Base of what is a rank's part of a tensor: no layer takes one for a whole tensor."""

    def take_apart(self) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The plain local tensor, and what makes one like this of such a tensor."""
        raise NotImplementedError


class ShardedActivation(SplitTensor):
    """A rank's shard of an activation whose tokens or features are split over tensor ranks.

    Our layers take and return it; element-by-element functions keep it; everything else raises, since on a shard of the
    features a plain norm, chunk, reshape or parameter gives the right shape and wrong numbers.

    Attributes:
        activation: how it is split.
        return_layout: the layout in which a row linear returns its output.
        num_features: features of all shards, when the last shard is padded (a vocabulary that does not divide).
        token_dim: of the tensor in the whole layout, where it holds a sequence rank's tokens; else None.
    """

    activation: Activation
    return_layout: Activation
    parallel: ModelParallel
    num_features: int | None
    token_dim: TokenDim | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in PASSED_ON or (getattr(func, "__name__", "") == "__get__" and func not in _RESHAPING):
            with torch._C.DisableTorchFunctionSubclass():
                out = func(*args, **kwargs)
            return args[0]._like(out) if func == _GRAD and out is not None else out
        if (
            func is torch.autograd.backward
        ):  # of reentrant checkpointing; not in the block below, it runs forwards again
            args, kwargs = tree_map_only(ShardedActivation, _as_gradient, (args, kwargs))
            return func(*args, **kwargs)
        first = args[0] if args else None
        if not isinstance(first, ShardedActivation):
            first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ShardedActivation))
        name = getattr(func, "__name__", str(func))
        if func is Tensor.register_hook:
            with torch._C.DisableTorchFunctionSubclass():
                return func(first, first._split_hook(*args[1:], **kwargs))
        # an autograd function that returns its input asks for a view of it: torch's full backward hooks do
        is_own_view = func is Tensor.view_as and args[0] is args[1]
        with torch._C.DisableTorchFunctionSubclass():
            if not is_own_view and not is_pointwise(func, args, kwargs):
                raise located_error(_refusal(name, first))
            _check_operands(name, first, (*args, *kwargs.values()))
            out = func(*args, **kwargs)
        if isinstance(out, tuple):
            return type(out)(first._like(each) for each in out)
        return out if isinstance(out, ShardedActivation) or not isinstance(out, Tensor) else first._like(out)

    def _split_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
        """The hook, given a gradient that is split as this is: what is wrong on a part is refused there too."""
        like, parallel = self._like_of(), self.parallel

        def split_hook(grad: Tensor) -> Tensor | None:
            changed = hook(like(grad))
            return None if changed is None else unwrap(changed, parallel)[0]

        return split_hook

    def _like_of(self) -> Callable[[Tensor], Tensor]:
        """`_like`, without holding this tensor: a hook of its own would keep it alive."""
        how = self.activation, self.return_layout, self.parallel, self.num_features, self.token_dim
        return lambda x: wrap(x, *how)

    def take_apart(self) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        return unwrap(self, self.parallel)[0], self._like_of()

    def _like(self, x: Tensor) -> Tensor:
        return wrap(x, self.activation, self.return_layout, self.parallel, self.num_features, self.token_dim)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"ShardedActivation(local {tuple(self.shape)}, {self.activation})"


def _as_gradient(x: ShardedActivation) -> Any:
    """What backward starts from: the edge of a tensor in the graph, or a gradient as a plain local tensor."""
    return get_gradient_edge(x) if x.requires_grad else unwrap(x, x.parallel)[0]


def _check_operands(name: str, first: ShardedActivation, operands: tuple[Any, ...]) -> None:
    """That tensors that meet element by element are split alike."""
    for operand in operands:
        if not isinstance(operand, Tensor) or operand is first:
            continue
        if isinstance(operand, ShardedActivation):
            if operand.activation != first.activation:
                raise located_error(
                    f"{name}: one operand is split as ({first.activation}), the other as ({operand.activation}); bring "
                    f"both to one layout with colossus.layers.to_whole or to_residual"
                )
        elif operand.dim() > 0 or operand.requires_grad:
            raise located_error(
                f"{name}: a plain tensor of shape {tuple(operand.shape)} meets an activation that is split "
                f"({first.activation}). A plain tensor or parameter is whole: call colossus.layers.to_whole(x) first, "
                f"or inside of a column/row pair let it come from a colossus.layers.Linear(.., split='column'), whose "
                f"output is split alike (the second matrix of LoRA, say)"
            )


def _refusal(name: str, x: ShardedActivation) -> str:
    hint = ""
    if "dropout" in name:
        hint = " For dropout use colossus.layers.Dropout, whose masks differ between shards."
    elif name in ("view", "reshape", "unflatten"):
        hint = " For the heads of an attention use colossus.layers.split_heads(x, heads) and merge_heads."
    elif name in ("chunk", "split", "tensor_split", "glu"):
        hint = (
            " For a gate let one linear give both: colossus.layers.Linear(inputs, dict(gate=n, value=n), "
            "split='column') returns two tensors."
        )
    elif name in ("layer_norm", "rms_norm"):
        hint = " colossus.layers.LayerNorm and RMSNorm are right on split features."
    return (
        f"{name} on an activation of which this rank holds a shard ({x.activation}; local shape {tuple(x.shape)}) "
        f"would give wrong values. Call colossus.layers.to_whole(x) before it, or keep to our layers and "
        f"element-by-element functions between a column and a row linear.{hint}"
    )


PASSED_ON: set[Any] = {
    *(getattr(Tensor, n) for n in ("dim", "size", "ndimension", "numel", "element_size", "is_contiguous", "stride",
                                   "is_floating_point", "retain_grad", "requires_grad_", "data_ptr",
                                   "storage_offset", "untyped_storage", "__len__", "__hash__", "is_complex",
                                   # a compiler asks for these
                                   "_is_view", "is_conj", "is_neg", "is_inference", "_is_zerotensor", "get_device")),
    torch.is_floating_point,
    torch.is_tensor,
    torch.is_inference,
    torch._is_functional_tensor,
    getattr(Tensor, "requires_grad").__set__,  # noqa: B009
}  # fmt: skip

_GRAD: Any = getattr(Tensor, "grad").__get__  # noqa: B009
_RESHAPING: set[Any] = {getattr(Tensor, n).__get__ for n in ("T", "mT", "H", "mH", "data")}


def wrap(
    x: Tensor,
    activation: Activation,
    return_layout: Activation,
    parallel: ModelParallel,
    num_features: int | None = None,
    token_dim: TokenDim | None = None,
) -> Tensor:
    """``x`` marked with how it is split; in the whole layout it is plain, or holds a sequence rank's tokens.

    Args:
        token_dim: `tokens_of` what it was made of: what holds no tokens, or is whole, gives what holds none.
    """
    if activation == parallel.regions.whole:
        return x if token_dim is None else with_tokens(x, token_dim, parallel.context.size("sequence"))
    out = x.as_subclass(ShardedActivation)
    out.activation, out.return_layout, out.parallel = activation, return_layout, parallel
    out.num_features, out.token_dim = num_features, token_dim
    return out


def refuse_heads(x: Tensor) -> None:
    """Whatever is a part of a tensor, but no `ShardedActivation`, is a rank's heads."""
    if isinstance(x, SplitTensor):
        raise located_error(
            f"{x!r} meets what takes whole tensors or split features: call colossus.layers.merge_heads(x) first"
        )


def unwrap(x: Tensor, parallel: ModelParallel) -> tuple[Tensor, Activation, Activation]:
    """The plain local tensor, how it is split, and its ``return_layout``. A plain tensor is in the whole layout."""
    if isinstance(x, ShardedActivation):
        if x.parallel is not parallel:
            raise located_error(
                f"an activation of {x.parallel.context} meets a layer of {parallel.context}: a model belongs to one "
                f"context; where several are alive, run it inside of `with context:`"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return x.as_subclass(Tensor), x.activation, x.return_layout
    refuse_heads(x)
    return local(x), parallel.regions.whole, parallel.regions.whole


def move(x: Tensor, source: Activation, target: Activation, context: ParallelContext) -> Tensor:
    """A plain local tensor moved between two activation layouts, with the conjugate moves for its gradient."""
    if source == target:
        return x
    for step in moves(source.at(x.dim()), target.at(x.dim())):
        x = conjugate(x, step.forward, step.backward, context.group(step.axes), step.dim, step.to_dim)
    return x


def to_whole(x: Tensor) -> Tensor:
    """The activation in the whole layout: all features on every rank, gradient complete.

    Plain torch is right on it; under ``parallel.sequence`` what works on each token by itself (see `SplitTokens`).
    """
    if not isinstance(x, ShardedActivation):
        refuse_heads(x)
        return x
    parallel, num_features = x.parallel, x.num_features
    shard, activation, _ = unwrap(x, parallel)
    user = parallel.regions.whole
    out = move(shard, activation, user, parallel.context)
    out = out if num_features is None or out.shape[-1] == num_features else out[..., :num_features]
    return wrap(out, user, user, parallel, token_dim=x.token_dim)


def to_residual(x: Tensor, parallel: ModelParallel | None = None) -> Tensor:
    """The activation in the layout between blocks: called once before a stack of blocks, it saves them all gathers."""
    parallel = parallel or (x.parallel if isinstance(x, ShardedActivation) else model_parallel_of(current_context()))
    token_dim = tokens_of(x)
    shard, activation, _ = unwrap(x, parallel)
    outer = parallel.regions.residual
    num_features = x.num_features if isinstance(x, ShardedActivation) else None
    out = move(shard, activation, outer, parallel.context)
    if num_features is not None and not outer.features:
        out, num_features = out[..., :num_features], None
    return wrap(out, outer, outer, parallel, num_features, token_dim)


def last_token(x: Tensor) -> Tensor:
    """x [batch, tokens, features], whose tokens no ranks split -> [batch, 1, features], laid out as it was."""
    if not isinstance(x, ShardedActivation):
        return x[:, -1:]
    shard, activation, return_layout = unwrap(x, x.parallel)
    return wrap(shard[:, -1:], activation, return_layout, x.parallel, x.num_features, x.token_dim)


def as_batch_of_one(forward: Callable[[Tensor], Any], x: Tensor) -> Any:
    """A layer's ``forward`` on x [features], as on a batch of one sample on every rank."""
    if isinstance(x, ShardedActivation):
        parallel = x.parallel
        shard, activation, return_layout = unwrap(x, parallel)
        x = wrap(shard.unsqueeze(0), activation, return_layout, parallel, x.num_features)
    else:
        x = x.unsqueeze(0)
    out = forward(x)
    return tuple(map(_first_sample, out)) if isinstance(out, tuple) else _first_sample(out)


def _first_sample(x: Tensor) -> Tensor:
    if not isinstance(x, ShardedActivation):
        return x.squeeze(0)
    parallel, num_features = x.parallel, x.num_features
    shard, activation, return_layout = unwrap(x, parallel)
    return wrap(shard.squeeze(0), activation, return_layout, parallel, num_features)
