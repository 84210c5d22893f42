"""Collectives of tensors whose lengths differ between ranks, and of many small tensors that travel together.

Ranks exchange the lengths first (`agree`), once for all tensors that are cut alike. There is no padding, and the count
is that of the bytes that leave a rank.

`gather_filled` and `reduce_scatter_filled` let the caller write many small tensors into the buffer that is sent, and
read them from the one that is received. Through shared memory these are the only copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colossus.comm import collectives, host_staging
from colossus.comm.collectives import transport_of
from colossus.comm.pending import Pending
from colossus.comm.step_regions import collective, timed
from colossus.comm.tensor_transport import Fill, Lengths, Take
from colossus.context.groups import AxisGroup


def agree(
    sent: Sequence[int], group: AxisGroup, device: torch.device, words: Sequence[int] = ()
) -> tuple[Lengths, list[list[int]]]:
    """Exchange with all ranks of the group how many rows each sends to each.

    Args:
        sent: rows that this rank sends to each rank of the group.
        group: the ranks that take part.
        device: the device of the rows, from which the lengths travel where the backend can send from it.
        words: integers that are sent to all ranks beside the lengths, as many on each rank.

    Returns:
        The lengths, and the words of each rank.
    """
    n = group.size
    rows = [[*sent, *words]]
    if n > 1:
        own = torch.tensor(rows[0], dtype=torch.int64, device=host_staging.wire_device(device, group))
        rows = collectives.all_gather(own, group, what="lengths").wait().view(n, -1).tolist()
    return Lengths.of([row[:n] for row in rows], group.index), [row[n:] for row in rows]


@timed(collective("all_to_all"), starts=True)
def all_to_all(x: Tensor, lengths: Lengths, group: AxisGroup, what: str = "rows") -> Pending:
    """Start to send each rank its part of ``x``: [rows sent, ..] -> [rows received, ..], in group order.

    Args:
        x: contiguous, the part for the first rank first; its dtype and other dims are the same on all ranks. It must
            not change before the result is there.
        lengths: rows of each part.
        group: the ranks that take part.
        what: a label; the bytes are counted under ``all_to_all <what>``.
    """
    leaving = (len(x) - lengths.sent[group.index]) * _row_bytes(x)
    entry = collectives.record("all_to_all", x, group, what=what, sent=leaving)
    most = max(map(sum, lengths.matrix)) * _row_bytes(x)
    return transport_of(x, group, most).exchange_rows(x, lengths).logged(entry)


@timed(collective("all_gather"), starts=True)
def all_gather(x: Tensor, lengths: Sequence[int], group: AxisGroup, what: str = "rows") -> Pending:
    """Start to concatenate the tensors of all ranks along dim 0: [own rows, ..] -> [sum of rows, ..].

    Args:
        x: contiguous; it must not change before the result is there.
        lengths: rows of each rank.
        group: the ranks that take part.
        what: a label; the bytes are counted under ``all_gather <what>``.
    """
    entry = collectives.record("all_gather", x, group, what=what)
    return transport_of(x, group, max(lengths) * _row_bytes(x)).gather_rows(x, lengths).logged(entry)


def _row_bytes(x: Tensor) -> int:
    return x.shape[1:].numel() * x.element_size()


@timed(collective("all_gather"), starts=True)
def gather_filled(x: Tensor, group: AxisGroup, fill: Fill, take: Take) -> Pending:
    """Start an all-gather of a flat tensor like ``x`` that ``fill`` writes, into ``x`` or into shared memory.

    ``wait()`` calls ``take`` with tensors of shape [ranks, size], of all ranks in group order: one of all ranks, or
    through shared memory one of each. Its own result has no meaning.
    """
    entry = collectives.record("all_gather", x, group)
    return transport_of(x, group).gather_filled(x, fill, take).logged(entry)


@timed(collective("reduce_scatter"), starts=True)
def reduce_scatter_filled(x: Tensor, group: AxisGroup, fill: Fill, take: Take) -> Pending:
    """Start a reduce-scatter of a tensor like ``x``, [ranks, size], that ``fill`` writes.

    ``wait()`` calls ``take`` with addends whose sum is this rank's row; its own result has no meaning. The number of
    addends depends on the way that the tensors travelled. Their order is the same on all ranks.
    """
    entry = collectives.record("reduce_scatter", x, group)
    return transport_of(x, group).scatter_filled(x, fill, take).logged(entry)
