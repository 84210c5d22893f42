"""The exchange of tokens' rows with the ranks of their experts, in the order of experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.comm import collectives, uneven
from colossus.comm.autograd import first_order
from colossus.comm.host_transfer import HostRead
from colossus.comm.kept_results import kept, read_once
from colossus.context.groups import AxisGroup
from colossus.layers.router import count_choices


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
    """Return the bytes that a rank sends for a layer's experts in forward and backward: of counts, and of rows.

    In forward, a rank sends E integers to each of n - 1 ranks. Rows travel there and back, and so do their gradients:
    2 (s + r) rows. With T tokens on each rank, k choices and balanced routing, s = r = T k (n - 1) / n.

    Args:
        own: s, the number of this rank's choices for experts of other ranks.
        others: r, the number of other ranks' choices for its experts.
    """
    return (ranks - 1) * num_experts * 8, 2 * (own + others) * row_bytes


def gather_counts(choices: Tensor, num_experts: int, group: AxisGroup) -> tuple[Tensor, HostRead]:
    """Return how many choices of each rank are for each expert, [ranks, E]: on the device, and on the way to the host.

    Args:
        choices: expert of each choice of this rank; ``num_experts`` stands for none.
    """
    counts = count_choices(choices, num_experts)
    gathered = collectives.all_gather(counts, group, what="lengths").wait().view(group.size, -1)
    return gathered, HostRead(gathered)


def arrived(read: HostRead) -> np.ndarray:
    """Return the counts on the host, which waits for them."""
    return read.wait().numpy()


class ExpertExchange:
    """The exchange of rows with the ranks of their experts, each of which has equally many experts, in order.

    The host reads the numbers of rows once, in `num_chosen` or `to_experts`: what the device is given before that runs
    meanwhile. A recomputation does not read them again. `bytes_sent` counts the traffic.

    Args:
        choices: expert of each choice of this rank; ``num_experts`` stands for none.
        num_experts: number of experts of all ranks.
        group: the ranks.
    """

    def __init__(self, choices: Tensor, num_experts: int, group: AxisGroup) -> None:
        self._group = group
        self._counts, self._read = read_once(lambda: gather_counts(choices, num_experts, group))

    @cached_property
    def _on_host(self) -> np.ndarray:
        """The counts by [from][to][expert of that rank]."""
        n = self._group.size
        return arrived(self._read).reshape(n, n, -1)

    @property
    def num_chosen(self) -> int:
        """The number of this rank's choices that have an expert."""
        return int(self._on_host[self._group.index].sum())

    def to_experts(self, rows: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Return the rows of all ranks for the experts of this one.

        Args:
            rows: [choices, h], sorted by expert.

        Returns:
            The rows [received, h], sorted by expert and then by rank; the number of rows of each of this rank's
            experts, on the host; and a function that sends one row for each of them back to its rank.
        """
        n, me = self._group.size, self._group.index
        lengths = uneven.Lengths.of(self._on_host.sum(-1).tolist(), me)
        received = self._counts.view(n, n, -1)[:, me]
        expert_of = torch.arange(received.shape[1], device=rows.device).repeat(n)
        expert_of = expert_of.repeat_interleave(received.flatten(), output_size=sum(lengths.received))
        order = expert_of.argsort(stable=True)
        place = inverse(order)

        def back(out: Tensor) -> Tensor:
            return _Exchange.apply(take_rows(out, place, order.unsqueeze(-1)), lengths.back, self._group)

        rows = _Exchange.apply(rows, lengths, self._group)
        counts = torch.tensor(self._on_host[:, me].sum(0).tolist())
        return take_rows(rows, order, place.unsqueeze(-1)), counts, back
