"""The products of the distributed matmul, streamed: one panel is multiplied while the next one travels.

C [.., c] = A [.., r] @ B [c, r].T, with B on the rank. Either A is gathered, or C is reduce-scattered, panel by panel:

| gathered or reduced along | in a panel |
|---|---|
| A, its last dim | C += A_p @ B[:, p].T |
| A, another dim (batch or tokens) | the rows p of C |
| C, its last dim | A @ B[p].T, sent to rank p |
| C, another dim | A's rows p @ B.T, sent to rank p |

The weight's gradient [c, r] = dY [.., c].T @ X [.., r] streams X the same way. (The loop over panels is SUMMA's, van de
Geijn and Watts 1997; that each rank starts with its own panel is Cannon's idea of 1969.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colossus.comm.collectives import Pending
from colossus.comm.recorded import is_recorded
from colossus.comm.streamed import stream_all_gather, stream_reduce_scatter
from colossus.tensor_parallel.move_plan import BoundCollective, run


def product(
    a: Tensor,
    b: Tensor,
    gather: Sequence[BoundCollective],
    reduce: Sequence[BoundCollective],
    bias: Tensor | None = None,
    *,
    panels: bool,
) -> Pending:
    """A @ B.T with A moved by ``gather`` before and the product moved by ``reduce`` after; the last move is started.

    Args:
        a: as stored; [.., r] once it is gathered.
        b: [c, r], gathered.
        bias: [c], added to the product before it is reduced, or None.
        panels: whether the last gather or the first reduce-scatter is streamed.
    """
    if panels and not is_recorded():
        if reduce and reduce[0].operation == "reduce_scatter" and _divides(a, b, reduce[0]):
            a = run(gather, a).wait()
            return run(reduce[1:], _product_with_scattered_c(a, b, bias, reduce[0]), owned=True)
        if gather and gather[-1].operation == "gather":
            a = run(gather[:-1], a).wait()
            return run(reduce, _product_with_gathered_a(a, b, bias, gather[-1]), owned=True)
    a = run(gather, a).wait()
    return run(reduce, torch.nn.functional.linear(a, b, bias), owned=True)


def wgrad_product(dy: Tensor, x: Tensor, gather: Sequence[BoundCollective], *, panels: bool) -> Tensor:
    """dY.T @ X with X moved by ``gather`` before: [c, r], still to be reduced."""
    if not (panels and gather and gather[-1].operation == "gather") or is_recorded():
        return flat(dy).t() @ flat(run(gather, x).wait())
    x = run(gather[:-1], x).wait()
    move = gather[-1]
    columns = move.dim == x.dim() - 1
    size = x.shape[move.dim]
    out = dy.new_empty(dy.shape[-1], x.shape[-1] * (move.group.size if columns else 1))
    first = True
    for rank, shard in stream_all_gather(x, move.group):
        if columns:
            torch.mm(flat(dy).t(), flat(shard), out=out[:, rank * size : (rank + 1) * size])
        else:
            rows = flat(dy.narrow(move.dim, rank * size, size)).t()
            out = torch.mm(rows, flat(shard), out=out) if first else out.addmm_(rows, flat(shard))
            first = False
    return out


def flat(x: Tensor) -> Tensor:
    """[.., f] as a matrix."""
    return x.reshape(-1, x.shape[-1])


def _product_with_gathered_a(a: Tensor, b: Tensor, bias: Tensor | None, move: BoundCollective) -> Tensor:
    size, n = a.shape[move.dim], move.group.size
    if move.dim == a.dim() - 1:
        out = a.new_empty(flat(a).shape[0], b.shape[0])
        first = True
        for rank, shard in stream_all_gather(a, move.group):
            panel = b[:, rank * size : (rank + 1) * size].t()
            if not first:
                out.addmm_(flat(shard), panel)
            elif bias is None:
                torch.mm(flat(shard), panel, out=out)
            else:
                torch.addmm(bias, flat(shard), panel, out=out)
            first = False
        return out.view(*a.shape[:-1], b.shape[0])
    shape = [*a.shape[:-1], b.shape[0]]
    shape[move.dim] *= n
    out = a.new_empty(shape)
    for rank, shard in stream_all_gather(a, move.group):
        _linear_out(out.narrow(move.dim, rank * size, size), shard, b, bias)
    return out


def _product_with_scattered_c(a: Tensor, b: Tensor, bias: Tensor | None, move: BoundCollective) -> Tensor:
    n = move.group.size
    shape = [*a.shape[:-1], b.shape[0]]
    shape[move.dim] //= n
    size = shape[move.dim]

    def columns(rank: int, out: Tensor) -> None:
        span = slice(rank * size, (rank + 1) * size)
        _linear_out(out, a, b[span], None if bias is None else bias[span])

    def rows(rank: int, out: Tensor) -> None:
        _linear_out(out, a.narrow(move.dim, rank * size, size), b, bias)

    return stream_reduce_scatter(columns if move.dim == a.dim() - 1 else rows, a, shape, move.group)


def _linear_out(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    """out[...] = a @ b.T + bias; without a copy where ``out`` is contiguous."""
    result = out.view(-1, out.shape[-1]) if out.is_contiguous() else torch.empty_like(out).view(-1, out.shape[-1])
    if bias is None:
        torch.mm(flat(a), b.t(), out=result)
    else:
        torch.addmm(bias, flat(a), b.t(), out=result)
    if not out.is_contiguous():
        out.copy_(result.view(out.shape))


def _divides(a: Tensor, b: Tensor, move: BoundCollective) -> bool:
    size = b.shape[0] if move.dim == a.dim() - 1 else a.shape[move.dim]
    return size % move.group.size == 0
