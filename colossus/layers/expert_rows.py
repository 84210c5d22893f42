"""Rows of tokens on their way to experts and back: in the order of experts, on the ranks that hold these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.comm import uneven
from colossus.comm.autograd import first_order
from colossus.context.groups import AxisGroup


class _TakeRows(torch.autograd.Function):
    """x [n, h] -> x[index] [m, h]; with ``pads`` a row of index n is zero.

    The gradient is taken as the value is, with ``sources`` [n, c]: of each row of x its places in the output. The sum
    over them has an order, which a scatter-add has not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, sources: Tensor, pads: bool) -> Tensor:
        ctx.save_for_backward(sources)
        ctx.pads = pads
        return (F.pad(x, (0, 0, 0, 1)) if pads else x)[index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (sources,) = ctx.saved_tensors
        dy = F.pad(grads[0], (0, 0, 0, 1)) if ctx.pads else grads[0]
        return dy[sources].sum(1), None, None, None


def take_rows(x: Tensor, index: Tensor, sources: Tensor, pads: bool = False) -> Tensor:
    """``x[index]``, whose gradient is summed in a fixed order: see `_TakeRows`."""
    out: Tensor = _TakeRows.apply(x, index, sources, pads)
    return out


def inverse(order: Tensor) -> Tensor:
    """Of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _Exchange(torch.autograd.Function):
    """x [rows sent, h] -> [rows received, h]: each rank gets its part; the gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: uneven.Lengths, group: AxisGroup) -> Tensor:
        ctx.exchange = lengths, group
        return uneven.all_to_all(x.contiguous(), lengths, group, what="tokens").wait()

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        lengths, group = ctx.exchange
        return uneven.all_to_all(grads[0].contiguous(), lengths.back, group, what="tokens").wait(), None, None


def to_experts(rows: Tensor, counts: Tensor, group: AxisGroup) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """The rows of all ranks for the experts of this one; each rank of ``group`` holds as many, in their order.

    With n ranks and E experts a rank sends n - 1 times the lengths (n + E integers of 8 bytes), and in a forward and
    its backward 2 (s + r) rows, where s of its own are for experts of others, and r of others for its own. In the mean
    over ranks, of T tokens on each with k choices and with balanced routing, s = r = T k (n - 1) / n.

    Args:
        rows: [choices, h], by expert.
        counts: of each expert of all ranks, [E].

    Returns:
        The rows [received, h], by expert, those of one expert by rank; how many are for each of this rank's experts;
        and what brings a row for each of them back to where it came from.
    """
    n, num_local = group.size, len(counts) // group.size
    per_expert = counts.tolist()
    per_rank = [sum(per_expert[rank * num_local :][:num_local]) for rank in range(n)]
    lengths, words = uneven.agree(per_rank, group, rows.device, per_expert)
    received = torch.tensor([row[group.index * num_local :][:num_local] for row in words])
    expert_of = torch.arange(num_local).repeat(n).repeat_interleave(received.flatten())
    order = expert_of.argsort(stable=True).to(rows.device)
    place = inverse(order)

    def back(out: Tensor) -> Tensor:
        return _Exchange.apply(take_rows(out, place, order.unsqueeze(-1)), lengths.back, group)

    arrived = _Exchange.apply(rows, lengths, group)
    return take_rows(arrived, order, place.unsqueeze(-1)), received.sum(0), back
