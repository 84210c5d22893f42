"""Rows of owned tables change hands, so that all owners have as much to do."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from colossus.comm import collectives, uneven
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.engine.sparse.partition_search import STEPS_EACH, PartitionFit, PartitionSearch
from colossus.engine.sparse.placement import FEWEST_PER_OWNER, PARTS_PER_OWNER, Placement
from colossus.engine.sparse.ways.owners import Owners
from colossus.layout.parameter import StoredSpec, spec_of

log = logging.getLogger("colossus.engine")


class Balance:
    """Places partitions by the rows that were touched in the first steps of a process.

    A placement follows from counts that all ranks have summed, so all come to the same one. What a row is, and what the
    optimizer keeps for it, does not change.

    Args:
        tables: the owned ones of this rank, each with its owners.
        after: steps after which tables are placed; 0: not at all.
        partitions: into how many parts each is cut; None: `PARTS_PER_OWNER` for each owner; "search": see
            `PartitionSearch`, which begins after these steps, or after as many as it times of each number.

    Attributes:
        fit: of the search that is over.
    """

    def __init__(
        self,
        tables: Sequence[tuple[Owners, AxisGroup]],
        context: ParallelContext,
        *,
        after: int,
        partitions: int | str | None,
    ) -> None:
        self._tables, self._context, self._after = tables, context, after
        self._pinned = partitions if isinstance(partitions, int) else None
        self._search: PartitionSearch | None = None
        self.fit: PartitionFit | None = None
        self._searches = partitions == "search"
        if self._searches:
            self._after = max(after, STEPS_EACH)
        self._steps = 0
        self._began, self._seconds = 0.0, 0.0
        for table, group in tables:
            table.counts = self._after > 0
            fewest = min(FEWEST_PER_OWNER * group.size, table.num_rows)
            if self._after and self._pinned is not None and self._pinned < fewest and context.is_logging_rank:
                log.warning(
                    "parallel.strategy.partitions = %d: table %r has %d owners, and with fewer than %d parts for each "
                    "one of them may have much more to send than the others: take %d or more, or leave it out",
                    *(self._pinned, table.name, group.size, FEWEST_PER_OWNER, fewest),
                )

    def begin_step(self) -> None:
        self._began = time.perf_counter()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Collective after the steps at which rows move: over all ranks while the search runs, else over owners."""
        self._steps += 1
        if self._search is None:
            if self._steps == self._after:
                self._begin(optimizer)
            return
        at = (self._steps - self._after) % (STEPS_EACH + 1)
        if at != 1:  # the first with other partitions is slower
            self._seconds += time.perf_counter() - self._began
        if at == 0:
            self._sampled(self._search, optimizer)

    def report(self) -> dict[str, float]:
        """Of the search, once it is over."""
        if self.fit is None:
            return {}
        return {f"partition_fit_{name}": getattr(self.fit, name) for name in "abc"} | {"partitions": self._found}

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._searches:
            self._place(self._pinned, optimizer)
            self._stop_counting()
            return
        sizes = [1, 1]
        for table, group in self._tables:
            sizes = [max(sizes[0], group.size), max(sizes[1], table.num_rows)]
        world = self._context.group(self._context.grid.names)
        most = torch.tensor(sizes, device=self._context.device)
        low, high = collectives.all_reduce(most, world, op="max", owned=True).wait().tolist()
        self._search = PartitionSearch(min(FEWEST_PER_OWNER * low, max(low, high)), high)
        self._place(self._search.parts, optimizer)

    def _sampled(self, search: PartitionSearch, optimizer: torch.optim.Optimizer) -> None:
        world = self._context.group(self._context.grid.names)
        mean = torch.tensor(self._seconds / STEPS_EACH, dtype=torch.float64, device=self._context.device)
        search.record(collectives.all_reduce(mean, world, op="max", owned=True).wait().item())
        self._seconds = 0.0
        self._place(search.parts, optimizer)
        if search.fit is not None:
            self.fit, self._found = search.fit, float(search.parts)
            self._search, self._after = None, 0
            self._stop_counting()
            if self._context.is_logging_rank:
                log.info("tables are cut into %d partitions: %s", search.parts, search.fit)

    def _stop_counting(self) -> None:
        for table, _ in self._tables:
            table.counts = False

    def _place(self, partitions: int | None, optimizer: torch.optim.Optimizer) -> None:
        for table, group in self._tables:
            touched = collectives.all_reduce(table.touched.to(torch.float64), group, owned=True).wait()
            counts = touched.cpu().numpy()
            parts = min(max(partitions or PARTS_PER_OWNER * group.size, group.size), table.num_rows)
            placement = Placement.balanced(counts, table.num_rows, group.size, parts)
            if self._context.is_logging_rank:
                before, after = (imbalance(each.loads(counts, group.size)) for each in (table.placement, placement))
                log.info(
                    "%s: %d partitions; the busiest owner had %.2f times the mean of touched rows, and has %.2f",
                    table.name, placement.num_parts, before, after,
                )  # fmt: skip
            move(table, placement, group, optimizer)


def imbalance(loads: Sequence[float]) -> float:
    """The largest over the mean; 1 where there are none."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def move(table: Owners, placement: Placement, group: AxisGroup, optimizer: torch.optim.Optimizer) -> None:
    """Give rows of a table, with what the optimizer keeps for each, to the owners that a placement says. Collective.

    Args:
        group: the owners.
    """
    param, device = table.param, table.param.device
    held = rows_of(table.placement, group.index, device)
    owners = placement.owners_of(held.cpu().numpy())
    to = torch.from_numpy(owners).to(device)
    order, counts = torch.argsort(to, stable=True), torch.bincount(to, minlength=group.size).tolist()
    stored, state = param.shape[0], optimizer.state.get(param, {})
    of_rows = [key for key, value in state.items() if isinstance(value, Tensor) and value.shape[:1] == (stored,)]
    lengths, heard = uneven.agree(counts, group, device, [len(of_rows)])
    assert all(words == heard[0] for words in heard), "owners keep different state"
    ids = uneven.all_to_all(held[order], lengths, group, "placed ids").wait()
    into = torch.argsort(ids)

    def moved(x: Tensor) -> Tensor:
        return uneven.all_to_all(x.detach()[: len(held)][order], lengths, group, "placed rows").wait()[into]

    spec = spec_of(param)
    assert isinstance(spec, StoredSpec)
    with torch._C.DisableTorchFunctionSubclass():  # a `SplitParameter` is here what it is
        for key in of_rows:
            state[key] = moved(state[key])
        param.data = moved(param.data)
    spec.place(placement.intervals(group.index))
    table.place(placement)


def rows_of(placement: Placement, owner: int, device: torch.device) -> Tensor:
    """The rows that an owner stores, in the order in which it does."""
    parts = [torch.arange(start, stop, device=device) for start, stop in placement.intervals(owner)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)
