"""Workers that wait for nobody: asynchronous SGD, Downpour, elastic averaging; and which one an option asks for."""

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
        self.at_servers.is_placed = False  # they are to be placed again

    # -- besides ------------------------------------------------------------------------------------------

    def report(self) -> dict[str, float]:
        return self.at_servers.report() | (self.tables.report() if self.tables else {})

    def close(self) -> None:
        self.part()
        super().close()
        self.at_servers.close()


class AsyncSGD(AsyncServer):
    """A worker pulls, and pushes its gradient, divided by its own tokens and clipped by its own norm; the servers apply
    it at once with the learning rate of the worker's step (Dean et al., NIPS 2012, with n = m = 1).
    """

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


class Downpour(AsyncServer):
    """After every ``push_every``-th step the updates since the last push are added to the servers' parameters, and
    every ``pull_every``-th step begins with these (Dean et al., NIPS 2012). As in TorchMPI updates are pushed, not
    gradients: the optimizer, any, is the worker's own.

    What a pull does not have yet of the worker's own updates is added to it, so that a worker never loses one. What was
    not pushed before a sync point (an evaluation, a checkpoint, the end) is pushed there.
    """

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        #: updates that were not pushed
        self._unpushed: list[Tensor] = self._zeros()
        #: updates that the pull under way will not have
        self._missing: list[Tensor] | None = None

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros_like(param, requires_grad=False) for param in self.trained]

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if step % self.options.pull_every == 0:
            self._take()
        if self.prefetches and (step + 1) % self.options.pull_every == 0:
            self._pull, self._missing = self.at_servers.pull(), [each.clone() for each in self._unpushed]

    @torch.no_grad()
    def _take(self) -> None:
        """Begin with the parameters at the servers, and one's own updates that these lack."""
        missing = self._unpushed if self._pull is None or self._missing is None else self._missing
        pull = self._pull or self.at_servers.pull()
        self._pull = self._missing = None
        pull.wait_into_parameters()
        torch._foreach_add_([param.detach() for param in self.trained], missing)

    @torch.no_grad()
    def update(self, optimizer: torch.optim.Optimizer) -> None:
        before = [param.detach().clone() for param in self.trained]
        super().update(optimizer)
        made = torch._foreach_sub([param.detach() for param in self.trained], before)
        torch._foreach_add_(self._unpushed, made)
        if self._missing is not None:
            torch._foreach_add_(self._missing, made)

    def after_step(self, step: int) -> None:
        if (step + 1) % self.options.push_every == 0:
            self._push()
        self.at_servers.finish_step(step)

    def _push(self) -> None:
        self.at_servers.add(self._unpushed)
        torch._foreach_zero_(self._unpushed)

    def come_together(self) -> None:
        if self._is_apart and self.at_servers.is_placed:
            self._push()
        self._missing = None
        super().come_together()

    def parameters_loaded(self) -> None:
        super().parameters_loaded()
        self._unpushed, self._missing = self._zeros(), None


class Elastic(AsyncServer):
    """After every ``push_every``-th step a worker and the anchor are drawn together (EASGD; 1412.6651):

        d = alpha (x - anchor);  x -= d;  anchor += d      alpha = beta / workers

    In mode "sync" all forces of a round are from the same anchor, and are added up. With SGD and Nesterov's momentum as
    the workers' optimizer it is EAMSGD. The servers' parameters are the anchor.
    """

    def is_due(self, step: int) -> bool:
        """Whether there is an exchange after step ``step`` (from 0)."""
        return (step + 1) % self.options.push_every == 0

    @property
    def alpha(self) -> float:
        """The elastic force; the workers that began count, those that died, too."""
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
                self.stop_agreement.enter(step + 1)  # all wait for all here; `reduce_scalars` is the end of it
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
    """``dict(type="server", ..)``; options as in `ServerOptions`."""
    checked = ServerOptions(**options)
    if checked.is_elastic:
        return Elastic(checked)
    if checked.algorithm == "downpour":
        return Downpour(checked)
    return SyncServer(checked) if checked.mode == "sync" else AsyncSGD(checked)
