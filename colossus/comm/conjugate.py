"""The conjugate collectives: each forward move with the backward move that its gradient needs.

| forward | backward | the value goes from | to |
|---|---|---|---|
| gather | reduce_scatter | sharded | replicated, gradient partial |
| gather | slice | sharded | the same on all ranks, gradient complete |
| reduce_scatter | gather | partial sum | sharded |
| sum | identity | partial sum | the same on all ranks, gradient complete |
| sum | sum | partial sum | replicated, gradient partial |
| identity | sum | the same on all ranks | replicated, gradient partial |
| slice | gather | the same on all ranks | sharded |
| slice | pad | replicated, gradient partial | sharded |
| all_to_all | all_to_all | sharded along one dim | sharded along another |

(The f and g of Megatron-LM, 1909.08053 section 3, are identity/sum and sum/identity.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colossus.comm import collectives
from colossus.comm.autograd import first_order
from colossus.comm.kept_results import kept
from colossus.comm.pending import Pending, Ready
from colossus.context.groups import AxisGroup


def start(
    operation: str, x: Tensor, group: AxisGroup, dim: int = -1, to_dim: int = -1, *, owned: bool = False
) -> Pending:
    """Start one move by its name in the table at the top.

    Args:
        dim: the dim that is, or gets, sharded.
        to_dim: of all_to_all, the dim that is sharded afterwards; ``dim`` is the one that is sharded before.
        owned: the caller gives ``x`` away; a sum may overwrite it.
    """
    if operation == "identity":
        return Ready(x)
    if operation == "gather":
        return collectives.all_gather(x, group, dim)
    if operation == "reduce_scatter":
        return collectives.reduce_scatter(x, group, dim)
    if operation == "sum":
        return collectives.all_reduce(x, group, owned=owned)
    if operation == "all_to_all":
        return collectives.all_to_all(x, group, split_dim=to_dim, concat_dim=dim)
    if operation == "slice":  # a copy: a view would keep the whole tensor alive for as long as the chunk
        return Ready(collectives.own_chunk(x, group, dim).clone(memory_format=torch.contiguous_format))
    assert operation == "pad", operation
    shape = list(x.shape)
    shape[dim] *= group.size
    out = x.new_zeros(shape)
    out.narrow(dim, group.index * x.shape[dim], x.shape[dim]).copy_(x)
    return Ready(out)


def not_a_view(y: Tensor) -> Tensor:
    """Return ``y`` as a tensor that is no view, without a copy, so that an autograd function may return it.

    PyTorch refuses to change an output in place when it is a view made inside the function, as the result of
    ``F.linear`` with a bias on three dims is.

    Args:
        y: a tensor that the function made and keeps nowhere else.
    """
    if torch.compiler.is_compiling() or not y._is_view():  # a compiler has no views and cannot trace `_is_view`
        return y
    plain: Tensor = torch.ops.aten._unsafe_view(y, y.shape)
    return plain


class _Conjugate(torch.autograd.Function):
    """One row of the table: ``forward`` moves x, ``backward`` moves dy back to the layout of x.

        gather, pad             [.., s, ..]         -> [.., n s, ..]        in ``dim``, over n ranks
        reduce_scatter, slice   [.., n s, ..]       -> [.., s, ..]
        all_to_all              [.., s, .., n t]    -> [.., n s, .., t]     in ``dim`` and ``to_dim``
        sum, identity           any shape           -> the same

    There is no weight, and so no wgrad.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: str, backward: str, group: AxisGroup, dim: int, to_dim: int) -> Tensor:
        ctx.move = backward, group, dim, to_dim

        def move() -> Tensor:
            return not_a_view(start(forward, x, group, dim, to_dim).wait())

        if forward == "identity":
            return x.view_as(x)
        return move() if forward in ("slice", "pad") else kept(f"a collective ({forward})", move)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        operation, group, dim, to_dim = ctx.move
        if operation == "all_to_all":
            dim, to_dim = to_dim, dim
        return start(operation, grads[0], group, dim, to_dim).wait(), None, None, None, None, None


def conjugate(x: Tensor, forward: str, backward: str, group: AxisGroup, dim: int = -1, to_dim: int = -1) -> Tensor:
    """Move ``x`` by ``forward``, and its gradient by ``backward``: names of moves in the table at the top."""
    if group.size == 1:
        return x
    return _Conjugate.apply(x, forward, backward, group, dim, to_dim)
