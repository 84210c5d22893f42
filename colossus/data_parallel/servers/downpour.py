"""Downpour SGD: workers make steps of their own, and tell the servers their sum now and then."""

from __future__ import annotations

import torch
from torch import Tensor

from colossus.data_parallel.servers.async_sgd import AsyncServer
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.reduction import ModelParts


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
