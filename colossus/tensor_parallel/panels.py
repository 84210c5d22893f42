"""The products of the distributed matmul, streamed: one panel is multiplied while the next one travels.

C [.., c] = A [.., r] @ B [c, r].T, with B whole. Either A is gathered, or C is reduced, panel by panel:

| gathered or reduced along | in a panel |
|---|---|
| A, its last dim | C += A_p @ B[:, p].T |
| A, another dim (batch or tokens) | the rows p of C |
| C, its last dim | A @ B[p].T, sent to rank p |
| C, another dim | A's rows p @ B.T, sent to rank p |

The weight's gradient [c, r] = dY [.., c].T @ X [.., r] streams X the same way. (The loop over panels is SUMMA's, van de
Geijn and Watts 1997; that it starts with one's own panel is Cannon's idea of 1969.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colossus.comm.collectives import Pending, is_recorded
from colossus.comm.streamed import stream_all_gather, stream_reduce_scatter
from colossus.tensor_parallel.route import Step, run


def product(
    a: Tensor, b: Tensor, gather: Sequence[Step], reduce: Sequence[Step], bias: Tensor | None = None, *, panels: bool
) -> Pending:
    """A @ B.T with A moved by ``gather`` before and the product moved by ``reduce`` after; the last move is started.

    Args:
        a: the rank's part as stored.
        b: [c, r] as used.
        bias: [c] of the product as made, or None.
    """
    if panels and not is_recorded():
        if reduce and reduce[0].operation == "reduce_scatter" and _divides(a, b, reduce[0]):
            a = run(gather, a).wait()
            return run(reduce[1:], _scattered(a, b, bias, reduce[0]), owned=True)
        if gather and gather[-1].operation == "gather":
            a = run(gather[:-1], a).wait()
            return run(reduce, _gathered(a, b, bias, gather[-1]), owned=True)
    a = run(gather, a).wait()
    return run(reduce, torch.nn.functional.linear(a, b, bias), owned=True)


def gathered_weight_gradient(dy: Tensor, x: Tensor, gather: Sequence[Step], *, panels: bool) -> Tensor:
    """dY.T @ X with X moved by ``gather`` before: [c, r] as made."""
    if not (panels and gather and gather[-1].operation == "gather") or is_recorded():
        return flat(dy).t() @ flat(run(gather, x).wait())
    x = run(gather[:-1], x).wait()
    step = gather[-1]
    columns = step.dim == x.dim() - 1
    size = x.shape[step.dim]
    out = dy.new_empty(dy.shape[-1], x.shape[-1] * (step.group.size if columns else 1))
    first = True
    for rank, part in stream_all_gather(x, step.group):
        if columns:
            torch.mm(flat(dy).t(), flat(part), out=out[:, rank * size : (rank + 1) * size])
        else:
            rows = flat(dy.narrow(step.dim, rank * size, size)).t()
            out = torch.mm(rows, flat(part), out=out) if first else out.addmm_(rows, flat(part))
            first = False
    return out


def flat(x: Tensor) -> Tensor:
    """[.., f] as a matrix."""
    return x.reshape(-1, x.shape[-1])


def _gathered(a: Tensor, b: Tensor, bias: Tensor | None, step: Step) -> Tensor:
    size, n = a.shape[step.dim], step.group.size
    if step.dim == a.dim() - 1:
        out = a.new_empty(flat(a).shape[0], b.shape[0])
        first = True
        for rank, part in stream_all_gather(a, step.group):
            panel = b[:, rank * size : (rank + 1) * size].t()
            if not first:
                out.addmm_(flat(part), panel)
            elif bias is None:
                torch.mm(flat(part), panel, out=out)
            else:
                torch.addmm(bias, flat(part), panel, out=out)
            first = False
        return out.view(*a.shape[:-1], b.shape[0])
    shape = [*a.shape[:-1], b.shape[0]]
    shape[step.dim] *= n
    out = a.new_empty(shape)
    for rank, part in stream_all_gather(a, step.group):
        _into(out.narrow(step.dim, rank * size, size), part, b, bias)
    return out


def _scattered(a: Tensor, b: Tensor, bias: Tensor | None, step: Step) -> Tensor:
    n = step.group.size
    shape = [*a.shape[:-1], b.shape[0]]
    shape[step.dim] //= n
    size = shape[step.dim]

    def columns(rank: int, out: Tensor) -> None:
        span = slice(rank * size, (rank + 1) * size)
        _into(out, a, b[span], None if bias is None else bias[span])

    def rows(rank: int, out: Tensor) -> None:
        _into(out, a.narrow(step.dim, rank * size, size), b, bias)

    return stream_reduce_scatter(columns if step.dim == a.dim() - 1 else rows, a, shape, step.group)


def _into(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    """out = a @ b.T + bias, where it lies."""
    where = out.view(-1, out.shape[-1]) if out.is_contiguous() else torch.empty_like(out).view(-1, out.shape[-1])
    if bias is None:
        torch.mm(flat(a), b.t(), out=where)
    else:
        torch.addmm(bias, flat(a), b.t(), out=where)
    if not out.is_contiguous():
        out.copy_(where.view(out.shape))


def _divides(a: Tensor, b: Tensor, step: Step) -> bool:
    size = b.shape[0] if step.dim == a.dim() - 1 else a.shape[step.dim]
    return size % step.group.size == 0
