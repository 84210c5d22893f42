"""What a step does with tables, in numbers: bytes by way, rows touched, alpha as it turns out."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn

from colossus.comm import accounting
from colossus.comm.cost import sent
from colossus.context.parallel_context import ParallelContext
from colossus.engine.gradients.axes import gradient_sum_axes
from colossus.engine.sparse.choice import Choice, Parties, choose
from colossus.engine.sparse.table import Table
from colossus.engine.sparse.ways.dense import Dense
from colossus.tensor_parallel.dtypes import gradient_dtype

log = logging.getLogger("colossus.engine")

#: steps over which alpha is averaged before it is compared with what a choice was made by
_STEPS = 20
#: how many times the bytes of the best way a table may send before somebody is told
_TOLERATED = 1.1


class Usage:
    """Of this rank.

    Args:
        tables: of this rank.
        dense: the parameters whose gradients are all-reduced in buckets.
        choices: by full name of a table how its way was chosen; nothing where no way is.
    """

    def __init__(
        self,
        context: ParallelContext,
        tables: Iterable[Table],
        dense: Iterable[nn.Parameter],
        choices: Mapping[str, Choice],
        parties: Parties,
    ) -> None:
        self._context, self._tables, self._dense = context, list(tables), list(dense)
        self._choices, self._parties = choices, parties
        self._counter: accounting.Counter | None = None
        self._bytes_dense: float | None = None
        self._touched = dict.fromkeys((table.name for table in self._tables), 0)
        self._steps, self._last = 0, dict[str, float]()

    def begin(self) -> None:
        """A step begins."""
        self.abandon()
        self._counter = accounting.Counter()
        accounting.listeners.append(self._counter)

    def end(self) -> None:
        """Its gradients are summed."""
        counter = self._counter
        assert counter is not None
        self.abandon()
        self._last = {
            "bytes_dense": self._sent_dense(),
            "bytes_gathered_rows": counter.bytes(operation="all_gather rows"),
            "bytes_owned_rows": counter.bytes(operation="all_to_all rows"),
            "rows_touched": float(sum(table.num_touched for table in self._tables)),
            **{f"alpha.{table.name}": table.num_touched / max(1, table.num_rows) for table in self._tables},
        }
        self._steps += 1
        for table in self._tables:
            self._touched[table.name] += table.num_touched
        if self._steps == _STEPS and self._context.is_logging_rank:
            self._tell_of_better_ways()

    def abandon(self) -> None:
        """Count no more."""
        if self._counter in accounting.listeners:
            accounting.listeners.remove(self._counter)
        self._counter = None

    def report(self) -> dict[str, float]:
        """Of the last step, by the names of metrics."""
        return dict(self._last)

    def _sent_dense(self) -> float:
        if self._bytes_dense is None:
            params = [*self._dense, *(table.param for table in self._tables if isinstance(table.way, Dense))]
            self._bytes_dense = sum(map(self._all_reduced, params))
        return self._bytes_dense

    def _all_reduced(self, param: nn.Parameter) -> float:
        ranks = self._context.size(gradient_sum_axes(param, self._context))
        return sent("all_reduce", ranks, param.numel() * gradient_dtype(param).itemsize)

    def _tell_of_better_ways(self) -> None:
        for table in self._tables:
            choice = self._choices.get(table.name)
            if choice is None or choice.is_pinned:
                continue
            rank = self._touched[table.name] / self._steps / max(1, table.num_rows)
            grown = rank / choice.alpha.rank if choice.alpha.rank else 1.0
            alpha = replace(choice.alpha, rank=rank, host=min(1.0, choice.alpha.host * grown), source="measured")
            better = choose(choice.table, alpha, self._parties)
            least, now = better.sent[better.way], better.sent[choice.way]
            if better.way != choice.way and now > _TOLERATED * least:
                log.warning(
                    "table %s: alpha is %.3g over the first %d steps, and was %.3g when its way was chosen: %r would "
                    "send %.3g of the bytes of %r; set parallel.strategy.ways={'%s': '%s'}",
                    table.name,
                    rank,
                    self._steps,
                    choice.alpha.rank,
                    better.way,
                    least / now,
                    choice.way,
                    table.name,
                    better.way,
                )
