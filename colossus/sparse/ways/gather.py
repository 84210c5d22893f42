"""Every rank gets the rows of all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from colossus.comm import uneven
from colossus.context.groups import AxisGroup
from colossus.rows.row_gradient import RowGradient
from colossus.sparse.ways.table_sync import TableSync


class Gather(TableSync):
    """All-gather of the rows that ranks have touched, as many as each of them has.

    In two levels: the ranks of a host share out the ids, and each adds up what its host has of its own. These travel
    between counterparts, and then inside of the host.

    Args:
        groups: the ranks that share the table; or those inside of a host, and their counterparts on all hosts.
    """

    def __init__(self, param: nn.Parameter, num_rows: int, groups: Sequence[AxisGroup]) -> None:
        super().__init__(param, num_rows)
        self._inside = groups[0] if len(groups) > 1 else None
        self._between = groups[-1]

    def start_sum(self, gradient: RowGradient, *, is_used: bool) -> Callable[[], RowGradient | None]:
        if self._inside is not None:
            gradient, is_used = _share_of_host(gradient, is_used, self._inside)
        wait = _start_gather(gradient, is_used, self._between)

        def finish() -> RowGradient | None:
            parts, is_used = wait()
            total = RowGradient.added(parts)
            if self._inside is not None:
                shares, _ = _start_gather(total, is_used, self._inside)()
                ids, order = torch.cat([share.ids for share in shares]).sort()
                total = RowGradient(ids, torch.cat([share.rows for share in shares])[order])
            return total if is_used else None

        return finish


def _start_gather(
    gradient: RowGradient, is_used: bool, group: AxisGroup
) -> Callable[[], tuple[list[RowGradient], bool]]:
    """The gradients of all ranks of a group, and whether one of them has used the table."""
    lengths, heard = uneven.agree([len(gradient.ids)] * group.size, group, gradient.ids.device, [is_used])
    counts = lengths.received
    ids = uneven.all_gather(gradient.ids, counts, group, "ids")
    rows = uneven.all_gather(gradient.rows.contiguous(), counts, group)
    return lambda: (RowGradient.parts(ids.wait(), rows.wait(), counts), any(used for (used,) in heard))


def _share_of_host(gradient: RowGradient, is_used: bool, group: AxisGroup) -> tuple[RowGradient, bool]:
    """What the ranks of a host have together of those ids that are this rank's, and whether one has used the table."""
    to = gradient.ids % group.size
    order, counts = torch.argsort(to, stable=True), torch.bincount(to, minlength=group.size).tolist()
    lengths, heard = uneven.agree(counts, group, to.device, [is_used])
    ids = uneven.all_to_all(gradient.ids[order], lengths, group, "ids")
    rows = uneven.all_to_all(gradient.rows[order], lengths, group, "rows")
    return RowGradient.added(RowGradient.parts(ids.wait(), rows.wait(), lengths.received)), any(
        used for (used,) in heard
    )
