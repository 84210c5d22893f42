"""Strategies whose workers do not wait for each other: asynchronous SGD, Downpour and elastic averaging."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.options.server_options import ServerOptions
from colossus.data_parallel.per_replica import PerReplica
from colossus.data_parallel.servers.server_parameters import ServerParameters
from colossus.data_parallel.servers.server_shards import Pull, tables_of_replica
from colossus.data_parallel.servers.sync import SyncServer
from colossus.data_parallel.strategy import Strategy
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.reduction import ModelParts
from colossus.layout.split_parameter import as_shards
from colossus.sparse.choice import Survey


class AsyncServer(PerReplica):
    """The base of asynchronous workers, which pull and push by themselves and wait for others at sync points only.

    The parameters at the servers are evaluated and exported, and are those of a checkpoint's plain keys. At sync points
    no pull or push is under way.

    With ``max_staleness`` s a worker begins step t once all others have finished t - s steps (stale synchronous
    parallel; Ho et al., NIPS 2013).
    """

    options: ServerOptions
    holds_parameters = False

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)

    def prepare(self, model: nn.Module, context: ParallelContext) -> None:
        self.tables = tables_of_replica(model, context)

    def check_tables(self, survey: Survey) -> None:
        """Accept all tables."""

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        self.at_servers = ServerParameters(
            self.options, parts, self.trained, lambda: self.on_progress(), self.tables or ()
        )
        #: the pull of the next step's parameters, where it has begun already
        self._pull: Pull | None = None

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.options.has_own_optimizer:
            self.at_servers.take_optimizer(optimizer)

    @property
    def prefetches(self) -> bool:
        """Return whether pulls begin one step early; a worker that trains alone would only miss its own push."""
        return self.options.prefetch and self.options.mode == "async" and self._data_group.size > 1

    # -- a step -------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if self.tables is not None:
            self.tables.begin_step()
        self.at_servers.place()
        self.at_servers.wait_for_slowest()

    def before_sync_point(self) -> None:
        """Wait until the servers have applied all pushes of this rank."""
        super().before_sync_point()
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
            self.before_sync_point()

    def average_addend(self) -> tuple[list[Tensor], float]:
        """Return the servers' parameters with weight 1 on the first replica, and zeros on the others."""
        with as_shards():
            self.at_servers.place()
            values = self.at_servers.whole(self.at_servers.pull(tables=True))
        if self._data_group.index == 0:
            return values, 1.0
        return [value.zero_() for value in values], 0.0

    def barrier(self) -> None:
        """Wait until all workers have come here. Collective over data."""
        collectives.barrier(self._data_group, self.parts.context.device)

    # -- state ----------------------------------------------------------------------------------------------

    def parameter_state(self) -> Mapping[nn.Parameter, Mapping[str, Any]]:
        """Return the servers' parameters on the first replica, where workers have parameters of their own, too."""
        if not self.own_parameters:
            return {}
        self.at_servers.place()
        values, weight = self.average_addend()
        return {param: {"server": value} for param, value in zip(self.trained, values, strict=True)} if weight else {}

    def load_parameter_state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        saved = [state.get(param, {}).get("server") for param in self.trained]
        values = [value for value in saved if value is not None]
        self.at_servers.begin_with(values if len(values) == len(saved) else None)

    def parameters_loaded(self) -> None:
        self._drop_pull()
        self.at_servers.is_placed = False  # the next step places them again

    # -- besides ------------------------------------------------------------------------------------------

    def report(self) -> dict[str, float]:
        return self.at_servers.report() | (self.tables.report() if self.tables else {})

    def close(self) -> None:
        self.wait_before_close()
        super().close()
        self.at_servers.close()


class AsyncSGD(AsyncServer):
    """Asynchronous SGD: a worker pulls parameters and pushes its gradient, which the servers apply at once.

    The gradient is divided by the worker's own tokens and clipped by its own norm. The learning rate is that of the
    worker's step (Dean et al., NIPS 2012, with n = m = 1).
    """

    #: a worker has the parameters of its last pull
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
        if self.is_summed(step):  # all have pushed, so the model has the updates of all workers from here on
            self.at_servers.wait_for_pushes()
            self.at_servers.pull(tables=True).wait_into_parameters()
        return numbers

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> Mapping[Any, Any]:
        state = self.at_servers.optimizer_state(optimizer)
        self.barrier()  # no worker pushes before all have the same state
        return state


class Downpour(AsyncServer):
    """Downpour (Dean et al., NIPS 2012): workers push the updates of their own optimizers, of any class.

    After every ``push_every``-th step the updates since the last push are added to the servers' parameters. Every
    ``pull_every``-th step begins with a pull of these. As in TorchMPI updates are pushed, not gradients.

    A worker adds its own updates that a pull does not contain, so that it never loses one. At a sync point (an
    evaluation, a checkpoint, the end) it pushes the rest.
    """

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        #: the updates since the last push
        self._unpushed: list[Tensor] = self._zeros()
        #: the updates that the pull under way will not contain
        self._missing: list[Tensor] | None = None

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros_like(param, requires_grad=False) for param in self.trained]

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if step % self.options.pull_every == 0:
            self._take()
        if self.prefetches and (step + 1) % self.options.pull_every == 0:
            self._pull, self._missing = self.at_servers.pull(), [update.clone() for update in self._unpushed]

    @torch.no_grad()
    def _take(self) -> None:
        """Set the parameters to those at the servers plus this worker's updates that these lack."""
        missing = self._unpushed if self._pull is None or self._missing is None else self._missing
        pull = self._pull or self.at_servers.pull()
        self._pull = self._missing = None
        pull.wait_into_parameters()
        torch._foreach_add_([param.detach() for param in self.trained], missing)

    @torch.no_grad()
    def update(self, optimizer: torch.optim.Optimizer) -> None:
        before = [param.detach().clone() for param in self.trained]
        super().update(optimizer)
        updates = torch._foreach_sub([param.detach() for param in self.trained], before)
        torch._foreach_add_(self._unpushed, updates)
        if self._missing is not None:
            torch._foreach_add_(self._missing, updates)

    def after_step(self, step: int) -> None:
        if (step + 1) % self.options.push_every == 0:
            self._push()
        self.at_servers.finish_step(step)

    def _push(self) -> None:
        self.at_servers.add(self._unpushed)
        torch._foreach_zero_(self._unpushed)

    def before_sync_point(self) -> None:
        if self._is_apart and self.at_servers.is_placed:
            self._push()
        self._missing = None
        super().before_sync_point()

    def parameters_loaded(self) -> None:
        super().parameters_loaded()
        self._unpushed, self._missing = self._zeros(), None


class Elastic(AsyncServer):
    """Elastic averaging (EASGD; 1412.6651), with the anchor at the servers.

    After every ``push_every``-th step a worker and the anchor move towards each other:

        d = alpha (x - anchor);  x -= d;  anchor += d      alpha = beta / workers

    In mode "sync" all forces of a round are computed from the same anchor, and summed. With SGD and Nesterov's momentum
    as the workers' optimizer it is EAMSGD.
    """

    def is_due(self, step: int) -> bool:
        """Return whether there is an exchange after step ``step`` (from 0)."""
        return (step + 1) % self.options.push_every == 0

    @property
    def alpha(self) -> float:
        """The strength of the elastic force; workers that died count, too."""
        return self.options.beta / self.parts.context.grid.size("data")

    def is_summed(self, step: int) -> bool:
        return (self.options.mode == "sync" and self.is_due(step)) or super().is_summed(step)

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if self.prefetches and self.is_due(step):
            self._pull = self.at_servers.pull()

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if self.is_due(step):
            is_sync = self.options.mode == "sync"
            if is_sync and self.stop_agreement is not None:
                self.stop_agreement.enter(step + 1)  # all replicas wait for each other here, until `reduce_scalars`
            anchor = self.at_servers.whole(self._pull or self.at_servers.pull())
            self._pull = None
            if is_sync:
                self.barrier()
            params = [param.detach() for param in self.trained]
            force = torch._foreach_sub(params, anchor)
            torch._foreach_mul_(force, self.alpha)
            torch._foreach_sub_(params, force)
            self.at_servers.add(force)
            if is_sync:
                self.at_servers.wait_for_pushes()
        self.at_servers.finish_step(step)


def make_server(**options: Any) -> Strategy:
    """Make the strategy of ``dict(type="server", ..)``; options as in `ServerOptions`."""
    server = ServerOptions(**options)
    if server.is_elastic:
        return Elastic(server)
    if server.algorithm == "downpour":
        return Downpour(server)
    return SyncServer(server) if server.mode == "sync" else AsyncSGD(server)
