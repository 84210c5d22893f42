"""Tables whose rows are at servers: a step pulls those that it looks up, and pushes their gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from colossus.context.parallel_context import ParallelContext
from colossus.sparse.tables import Tables
from colossus.sparse.ways import TableSync


class ServerRows(TableSync):
    """A table that this rank shares with no other of its replica.

    What is here of it is as old as the last pull of each row, until the whole table is pulled.

    Args:
        pull: the rows of ascending distinct ids, from the servers.
    """

    def __init__(self, param: nn.Parameter, num_rows: int, pull: Callable[[Tensor], Tensor]) -> None:
        super().__init__(param, num_rows)
        self._pull = pull
        #: [rows] those that this step has pulled; None outside of steps, when what is here is looked up
        self._is_new: Tensor | None = None

    def begin(self) -> None:
        self._is_new = torch.zeros(len(self.param), dtype=torch.bool, device=self.param.device)

    def end(self) -> None:
        self._is_new = None

    def fetch(self, ids: Tensor) -> Tensor:
        if self._is_new is not None:
            wanted = ids[~self._is_new[ids]]
            if len(wanted):
                self.param.detach()[wanted] = self._pull(wanted).to(self.param.device)
                self._is_new[wanted] = True
        return super().fetch(ids)


def tables_of_replica(model: nn.Module, context: ParallelContext) -> Tables | None:
    """The tables of a rank's part of a model, whose gradients are summed inside of the replica; None: it has none."""
    tables = Tables(model, context, lambda name, shape, ranks: "gather", context.replica_axes)
    return tables if tables else None
