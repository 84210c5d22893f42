"""The exchange of tokens' rows with the ranks of their experts, in the order of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.comm import uneven
from colossus.comm.autograd import first_order
from colossus.comm.kept_results import kept
from colossus.context.groups import AxisGroup


class _TakeRows(torch.autograd.Function):
    """x [n, h] -> x[index] [m, h]; with ``pads`` a row of index n is zero.

    The gradient uses ``sources`` [n, c]: the places of each row of x in the output. The sum over them has a fixed
    order, unlike a scatter-add.
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
    """Return ``x[index]``, whose gradient is summed in a fixed order: see `_TakeRows`."""
    out: Tensor = _TakeRows.apply(x, index, sources, pads)
    return out


def inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows, x [rows sent, h] -> [rows received, h]; the gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: uneven.Lengths, group: AxisGroup) -> Tensor:
        ctx.exchange = lengths, group
        rows = x.contiguous()
        return kept("an exchange of tokens", lambda: uneven.all_to_all(rows, lengths, group, what="tokens").wait())

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        lengths, group = ctx.exchange
        return uneven.all_to_all(grads[0].contiguous(), lengths.back, group, what="tokens").wait(), None, None


def bytes_sent(own: int, others: int, ranks: int, num_experts: int, row_bytes: int) -> tuple[int, int]:
    """Return the bytes that a rank sends for a layer's experts in forward and backward: of lengths, and of rows.

    In forward, a rank sends n + E integers to each of n - 1 ranks. Rows travel there and back, and so do their
    gradients: 2 (s + r) rows. With T tokens on each rank, k choices and balanced routing, s = r = T k (n - 1) / n.

    Args:
        own: s, the number of this rank's choices for experts of other ranks.
        others: r, the number of other ranks' choices for its experts.
    """
    return (ranks - 1) * (ranks + num_experts) * 8, 2 * (own + others) * row_bytes


def agree(rows: Tensor, counts: Tensor, group: AxisGroup) -> tuple[uneven.Lengths, Tensor]:
    """Return how many rows each rank sends to each, and how many of each rank are for each expert here [ranks, own]."""
    n, num_local = group.size, len(counts) // group.size
    per_expert = counts.tolist()
    per_rank = [sum(per_expert[rank * num_local :][:num_local]) for rank in range(n)]
    lengths, words = uneven.agree(per_rank, group, rows.device, per_expert)
    return lengths, torch.tensor([row[group.index * num_local :][:num_local] for row in words])


def to_experts(rows: Tensor, counts: Tensor, group: AxisGroup) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Return the rows of all ranks for the experts of this one; each rank of ``group`` has equally many, in order.

    `bytes_sent` counts the traffic.

    Args:
        rows: [choices, h], sorted by expert.
        counts: rows of each expert of all ranks, [E].

    Returns:
        The rows [received, h], sorted by expert and then by rank; the number of rows of each of this rank's experts;
        and a function that sends one row for each of them back to its rank.
    """
    lengths, received = kept("the lengths of an exchange", lambda: agree(rows, counts, group))
    expert_of = torch.arange(received.shape[1]).repeat(group.size)
    expert_of = expert_of.repeat_interleave(received.flatten(), output_size=sum(lengths.received))
    order = expert_of.argsort(stable=True).to(rows.device)
    place = inverse(order)

    def back(out: Tensor) -> Tensor:
        return _Exchange.apply(take_rows(out, place, order.unsqueeze(-1)), lengths.back, group)

    arrived = _Exchange.apply(rows, lengths, group)
    return take_rows(arrived, order, place.unsqueeze(-1)), received.sum(0), back
