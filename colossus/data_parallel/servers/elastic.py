"""Elastic averaging: workers make steps of their own, and are held together by an anchor at the servers."""

from __future__ import annotations

import torch

from colossus.data_parallel.servers.async_sgd import AsyncServer


class Elastic(AsyncServer):
    """After every ``push_every``-th step a worker and the anchor are drawn together (EASGD; 1412.6651):

        d = alpha (x - anchor);  x -= d;  anchor += d      alpha = beta / workers

    In mode "sync" all forces of a round are from the same anchor, and are added up. EAMSGD is the same with Nesterov's
    momentum in the workers' steps, as torch's SGD has it. The servers' parameters are the anchor.
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
