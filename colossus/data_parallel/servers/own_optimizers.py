"""Workers with optimizers of their own: Downpour and elastic averaging; and which algorithm an option asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colossus.data_parallel.options.server_options import ServerOptions
from colossus.data_parallel.servers.async_sgd import AsyncServer, AsyncSGD
from colossus.data_parallel.servers.sync import SyncServer
from colossus.data_parallel.strategy import Strategy
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.reduction import ModelParts


def make_server(**options: Any) -> Strategy:
    """``dict(type="server", ..)``; options as in `ServerOptions`."""
    checked = ServerOptions(**options)
    if checked.is_elastic:
        return Elastic(checked)
    if checked.algorithm == "downpour":
        return Downpour(checked)
    return SyncServer(checked) if checked.mode == "sync" else AsyncSGD(checked)


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
