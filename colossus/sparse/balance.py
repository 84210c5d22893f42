"""Rows of owned tables are placed so that all owners have as much to do, by what the first steps have touched."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from colossus.comm import collectives
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.sparse.move_rows import move_rows
from colossus.sparse.placement import PARTS_PER_OWNER, Placement
from colossus.sparse.ways.owners import Owners

log = logging.getLogger("colossus.engine")
#: steps of which a search times each number of partitions, after one that it does not
STEPS_EACH = 5


class Balance:
    """A placement follows from counts that all ranks have summed, so all come to the same one. What a row is, and what
    the optimizer keeps for it, does not change.

    Args:
        tables: the owned ones of this rank, each with its owners.
        after: steps after which tables are placed; 0: not at all.
        partitions: into how many parts each is cut; None: `PARTS_PER_OWNER` for each owner; "search": the number with
            the shortest steps (`best_partitions`), tried from one for each owner on, doubling until steps take longer.
    """

    def __init__(
        self,
        tables: Sequence[tuple[Owners, AxisGroup]],
        context: ParallelContext,
        *,
        after: int,
        partitions: int | str | None,
    ) -> None:
        self._tables, self._context, self._searches = tables, context, partitions == "search"
        self._after = max(after, STEPS_EACH) if self._searches else after
        self._parts = partitions if isinstance(partitions, int) else None
        #: of a search: partitions -> seconds of a step
        self._times: dict[int, float] = {}
        self._steps, self._began, self._seconds = 0, 0.0, 0.0
        for table, _ in tables:
            table.counts = self._after > 0

    def begin_step(self) -> None:
        self._began = time.perf_counter()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Collective after the steps at which rows move: over all ranks while a search runs, else over owners."""
        self._steps += 1
        after = self._steps - self._after
        if not self._after or after < 0:
            return
        if self._searches and after % (STEPS_EACH + 1) > 1:  # the first with other partitions is slower
            self._seconds += time.perf_counter() - self._began
        if after % (STEPS_EACH + 1) == 0:
            self._parts = self._next_parts() if self._searches else self._parts
            self._place(optimizer)
            if not self._searches:
                self._after = 0
                for table, _ in self._tables:
                    table.counts = False

    def report(self) -> dict[str, float]:
        """How many partitions a search that is over has found."""
        return {"partitions": float(self._parts or 0)} if self._times and not self._searches else {}

    def _next_parts(self) -> int:
        """The number to be tried next, or, when the search is over, the best. Collective over all ranks."""
        sizes = [max((max(group.size, 1) for _, group in self._tables), default=1)]
        sizes.append(max((table.num_rows for table, _ in self._tables), default=1))
        told = torch.tensor([*sizes, self._seconds / STEPS_EACH], dtype=torch.float64, device=self._context.device)
        world = self._context.group(self._context.grid.names)
        low, high, seconds = collectives.all_reduce(told, world, op="max", owned=True).wait().tolist()
        self._seconds, first, most = 0.0, int(low), max(int(low), int(high))
        if self._parts is None:
            return first
        is_longer = len(self._times) > 1 and seconds > list(self._times.values())[-1]
        self._times[self._parts] = seconds
        if not is_longer and self._parts < most:
            return min(2 * self._parts, most)
        self._searches = False
        return best_partitions(self._times, first, most)

    def _place(self, optimizer: torch.optim.Optimizer) -> None:
        for table, group in self._tables:
            touched = collectives.all_reduce(table.touched.to(torch.float64), group, owned=True).wait()
            counts = touched.cpu().numpy()
            parts = min(max(self._parts or PARTS_PER_OWNER * group.size, group.size), table.num_rows)
            placement = Placement.balanced(counts, table.num_rows, group.size, parts)
            if self._context.is_logging_rank:
                before, after = (imbalance(each.loads(counts, group.size)) for each in (table.placement, placement))
                log.info(
                    "%s: %d partitions; the busiest owner had %.2f times the mean of touched rows, and has %.2f",
                    table.name, placement.num_parts, before, after,
                )  # fmt: skip
            move_rows(table, placement, group, optimizer)


def imbalance(loads: Sequence[float]) -> float:
    """The largest over the mean; 1 where there are none."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def best_partitions(times: Mapping[int, float], low: int, high: int) -> int:
    """The number P of partitions with the shortest step, in low..high, from the seconds of a step with some numbers.

    As Parallax has it (1808.02621, section 3.2): a step takes b / P + a (P - 1) + c, where b is work that partitions
    share and a what each one costs, so that the best number is the square root of b / a. Where the fit has no minimum
    (a partition costs nothing, or shares no work), the one of the shortest steps, the smallest of these.
    """
    parts, seconds = np.array(list(times), dtype=np.float64), np.array(list(times.values()))
    terms = np.stack((parts - 1, 1 / parts, np.ones_like(parts)), axis=1)
    scale = np.maximum(np.abs(terms).max(0), 1e-12)
    a, b, _ = (np.linalg.lstsq(terms / scale, seconds, rcond=None)[0] / scale).tolist()
    if min(a, b) > 0 and a * parts.max() + b / parts.min() > 1e-9 * seconds.max():
        found = max(1, round((b / a) ** 0.5))
    else:
        found = min(times, key=lambda number: (times[number], number))
    return min(max(found, low), high)
