"""Synchronous steps at parameter servers: exact, as all-reduce is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.all_reduce import AllReduce
from colossus.data_parallel.options.server_options import ServerOptions
from colossus.data_parallel.servers.server_parameters import ServerParameters
from colossus.data_parallel.servers.server_shards import Pull, tables_of_replica
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.gradient_norm import GradientNorm
from colossus.gradients.reduction import GradientReduction, ModelParts


class SyncServer(AllReduce):
    """Synchronous steps at parameter servers.

    All workers push their sums of gradients. The servers sum them, return the square of their norm, and apply the
    optimizer once to the divided and clipped total. Every worker then pulls the parameters of the next step.

    The engine's optimizer has the groups and their options, which are sent in each step. Its state is at the servers.
    """

    def __init__(self, options: ServerOptions) -> None:
        super().__init__()
        self.options = options

    def prepare(self, model: nn.Module, context: ParallelContext) -> None:
        self.tables = tables_of_replica(model, context)

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        self.at_servers = ServerParameters(
            self.options, parts, self.trained, lambda: self.on_progress(), self.tables or ()
        )
        #: the number of the synchronous step; failed steps are counted, too
        self._number = 0
        self._pull: Pull | None = None

    def make_reduction(self) -> GradientReduction:
        return GradientReduction(self.without_tables(self.parts), self.parts.context.replica_axes)

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        self.at_servers.take_optimizer(optimizer)

    # -- a step -------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self._number += 1
        self.at_servers.place()

    def finish(self) -> None:
        super().finish()
        self.at_servers.accumulate(self._number)

    def squares_of_step(self, norm: GradientNorm, squares: Tensor) -> Tensor:
        """Return the squares of the sums at the servers, on the first of the ranks that push a parameter."""
        total = squares * 0.0  # keeps what is not finite on this rank
        server_squares = self.at_servers.squares(self._number)
        if self._data_group.index == 0:
            place = {id(param): number for number, param in reversed(list(enumerate(norm.params)))}
            for param, square in server_squares:
                total[place[id(param)]] += square
        return total

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        scale: Tensor,
        before_update: Callable[[], None],
        found_inf: Tensor | None = None,
        clip_value: float | None = None,
    ) -> None:
        before_update()
        skipped = found_inf is not None and bool(found_inf)
        self._pull = self.at_servers.apply(self._number, None if skipped else scale.item(), clip_value)

    def after_step(self, step: int) -> None:
        assert self._pull is not None
        self._pull.wait_into_parameters()
        self._pull = None
        if self.parts.syncs_after(step + 1):
            self.sync_point()

    # -- besides ------------------------------------------------------------------------------------------

    def sync_point(self) -> None:
        """Pull the tables whole; steps pull only the rows that they look up."""
        self.at_servers.pull_tables()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        self.sync_point()
        with super().evaluation():
            yield

    def parameters_loaded(self) -> None:
        self.at_servers.is_placed = False  # the next step places them again

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> Mapping[Any, Any]:
        return self.at_servers.optimizer_state(optimizer)

    def report(self) -> dict[str, float]:
        return self.at_servers.report() | (self.tables.report() if self.tables else {})

    def close(self) -> None:
        self.at_servers.close()
