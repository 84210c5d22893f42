"""Workers that wait for nobody: what asynchronous algorithms have in common, and asynchronous SGD."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.options.server_options import ServerOptions
from colossus.data_parallel.per_replica import PerReplica
from colossus.data_parallel.servers.server_parameters import ServerParameters
from colossus.data_parallel.servers.server_shards import Pull, require_rows
from colossus.data_parallel.servers.server_tables import tables_of_replica
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.reduction import ModelParts
from colossus.layout.split_parameter import as_shards
from colossus.sparse.choice import Survey

log = logging.getLogger("colossus.engine")


class AsyncServer(PerReplica):
    """Base: a worker pulls and pushes when it is there, and meets others only as `PerReplica` has it.

    The parameters at the servers are those that are evaluated and exported, and what checkpoints hold under the plain
    keys. At sync points nothing is under way.

    With ``max_staleness`` s a worker begins step t once all others have finished t - s steps (stale synchronous
    parallel; Ho et al., NIPS 2013).
    """

    options: ServerOptions
    holds_parameters = False

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)

    def prepare(self, model: nn.Module, context: ParallelContext) -> None:
        require_rows(self.options.servers, model)
        self.tables = tables_of_replica(model, context)

    def check_tables(self, found: Survey) -> None:
        """All are taken."""

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        self.at_servers = ServerParameters(
            self.options, parts, self.trained, lambda: self.on_progress(), self.tables or ()
        )
        #: what the next step begins with, where it was asked for already
        self._pull: Pull | None = None

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.options.has_own_optimizer:
            self.at_servers.take_optimizer(optimizer)

    @property
    def prefetches(self) -> bool:
        """Alone there is nothing new to wait for but one's own push."""
        return self.options.prefetch and self.options.mode == "async" and self._data_group.size > 1

    # -- a step -------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if self.tables is not None:
            self.tables.begin_step()
        self.at_servers.place()
        self.at_servers.wait_for_slowest()

    def come_together(self) -> None:
        """Let all that was pushed be applied."""
        super().come_together()
        self._drop_pull()
        self.at_servers.wait_for_pushes()

    def _drop_pull(self) -> None:
        if self._pull is not None:
            self._pull.wait()
            self._pull = None

    # -- evaluation and export ------------------------------------------------------------------------------

    def sync_point(self) -> None:
        if self._data_group.size > 1:
            super().sync_point()
        else:
            self.come_together()

    def average_addend(self) -> tuple[list[Tensor], float]:
        """The first replica gives all: what the servers have."""
        with as_shards():
            self.at_servers.place()
            values = self.at_servers.whole(self.at_servers.pull(tables=True))
        if self._data_group.index == 0:
            return values, 1.0
        return [value.zero_() for value in values], 0.0

    def barrier(self) -> None:
        """Until all workers have come this far. Collective over data."""
        collectives.barrier(self._data_group, self.parts.context.device)

    # -- state ----------------------------------------------------------------------------------------------

    def parameter_state(self) -> Mapping[nn.Parameter, Mapping[str, Any]]:
        """What the servers have, of the first replica, where workers have parameters of their own beside it."""
        if not self.own_parameters:
            return {}
        self.at_servers.place()
        values, weight = self.average_addend()
        return {param: {"server": each} for param, each in zip(self.trained, values, strict=True)} if weight else {}

    def load_parameter_state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        values = [state.get(param, {}).get("server") for param in self.trained]
        found = [each for each in values if each is not None]
        self.at_servers.begin_with(found if len(found) == len(values) else None)

    def parameters_loaded(self) -> None:
        self._drop_pull()
        self.at_servers.forget()

    # -- besides ------------------------------------------------------------------------------------------

    def report(self) -> dict[str, float]:
        return self.at_servers.report() | (self.tables.report() if self.tables else {})

    def close(self) -> None:
        self.part()
        super().close()
        self.at_servers.close()


class AsyncSGD(AsyncServer):
    """A worker pulls, and pushes its gradient, divided by its own tokens and clipped by its own norm; the servers apply
    it at once with the learning rate of the worker's step (Dean et al., NIPS 2012, with n = m = 1)."""

    #: what a worker has of the parameters is what it has pulled
    own_parameters = False

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        pull, self._pull = self._pull or self.at_servers.pull(), None
        pull.wait_into_parameters()
        if self.prefetches:
            self._pull = self.at_servers.pull()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        self.at_servers.push_gradients()

    def after_step(self, step: int) -> None:
        self.at_servers.finish_step(step)

    def sync_point(self) -> None:
        super().sync_point()
        if self._completed or self.at_servers.is_placed:
            self.at_servers.place()
            self.at_servers.pull(tables=True).wait_into_parameters()
            self.barrier()

    def reduce_scalars(self, step: int, numbers: Tensor) -> Tensor:
        numbers = super().reduce_scalars(step, numbers)
        if self.is_summed(step):  # all have pushed: who looks at the model sees what was made of it
            self.at_servers.wait_for_pushes()
            self.at_servers.pull(tables=True).wait_into_parameters()
        return numbers

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> Mapping[Any, Any]:
        found = self.at_servers.optimizer_state(optimizer)
        self.barrier()  # nobody pushes before all have this
        return found
