"""Evaluation: forward passes in eval mode, with losses summed over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.host_transfer import HostRead, send_to
from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.strategy import Strategy
from colossus.engine.forward_buffers import ForwardBuffers
from colossus.engine.optimizer_step import loss_axes
from colossus.engine.results import EvalResult

_END = object()


class Evaluation:
    """The evaluation of a model.

    Args:
        model: the rank's part of the model.
        metrics: names of the sums beside the loss.
        context: the rank's context.
        strategy: the data-parallel strategy.
        buffers: buffers of the model that forwards change.
        forward: returns sums and counts of the loss and of each metric over this rank's batch, float64 [1 + metrics,
            2].
    """

    def __init__(
        self,
        model: nn.Module,
        metrics: Sequence[str],
        context: ParallelContext,
        strategy: Strategy,
        buffers: ForwardBuffers,
        forward: Callable[[Any], Tensor],
    ) -> None:
        self._model, self._metrics, self._context = model, metrics, context
        self._strategy, self._buffers, self._forward = strategy, buffers, forward
        self._loss_group, self._world = context.group(loss_axes(context)), context.group(context.grid.names)

    @torch.no_grad()
    def one_batch(self, batch: Any) -> EvalResult:
        with self._eval_mode():
            return self._result(self._forward(batch))

    @torch.no_grad()
    def all_batches(
        self, loader: Any, max_batches: int | None, stop_request: Callable[[], float]
    ) -> tuple[EvalResult, float]:
        """Return the sums over a loader's batches, and the sum of the stop requests that have ended it early.

        Args:
            loader: validation batches.
            max_batches: most batches to evaluate; None for all.
            stop_request: returns this rank's stop request (`results.addend`) before each batch; one ends all ranks.

        Raises:
            ValueError: on all ranks, if some have fewer batches than others.
        """
        totals = torch.zeros(1 + len(self._metrics), 2, dtype=torch.float64, device=self._context.device)
        stops = 0.0
        with self._eval_mode():
            batches = chain(islice(loader, max_batches), (_END,))
            coming = next(batches)
            asked = self._ask(stop_request(), coming is _END)
            while True:
                batch, (stops, ended) = coming, asked.wait().tolist()
                if 0 < ended < self._world.size:
                    raise ValueError(
                        f"the validation data ended on {ended:.0f} of {self._world.size} ranks after fewer batches "
                        f"than on the others: with data.validation per_rank, or a DistributedSampler, every data rank "
                        f"must have as many. Set train.eval_batches to the smallest number"
                    )
                if ended:
                    stops = 0.0
                if stops or ended:
                    break
                coming = next(batches)
                asked = self._ask(stop_request(), coming is _END)  # before the forward, which the host need not await
                totals += self._forward(batch)
            return self._result(totals), stops

    def _ask(self, stop_request: float, has_ended: bool) -> HostRead:
        """Start to sum up over all ranks who wants to stop, and whose batches have ended."""
        own = torch.tensor([stop_request, has_ended], dtype=torch.float32)
        return HostRead(collectives.all_reduce(send_to(self._context.device, own), self._world, owned=True).wait())

    def _result(self, totals: Tensor) -> EvalResult:
        """Sum over all ranks."""
        self._buffers.end_evaluation()
        numbers = collectives.all_reduce(totals.flatten(), self._loss_group, owned=True).wait()
        total, tokens, *metric_sums = numbers.tolist()
        pairs = zip(metric_sums[::2], metric_sums[1::2], strict=True)
        return EvalResult(total, tokens, dict(zip(self._metrics, pairs, strict=True)))

    @contextmanager
    def _eval_mode(self) -> Iterator[None]:
        was_training = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            with self._context, self._strategy.evaluation():
                self._buffers.begin()
                yield
        finally:
            for module, mode in was_training:  # one by one, since a user may have set some to eval mode
                module.training = mode
