"""Evaluation: batches run forward only, with the model in eval mode, and their losses summed over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import nn

from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.strategy import Strategy
from colossus.engine.eval_metrics import EvalTotals
from colossus.engine.results import EvalResult
from colossus.engine.step_numbers import StepReduction

_NONE = object()


class Evaluation:
    """Evaluates a model.

    Args:
        metrics: names of what is summed beside the loss.
        forward: runs a batch of this rank forward; sums of this rank, not yet over ranks.
        failed: called when a batch could not be read, which other ranks do not know.
    """

    def __init__(
        self,
        model: nn.Module,
        metrics: Sequence[str],
        context: ParallelContext,
        forward: Callable[[Any], EvalTotals],
        failed: Callable[[], None],
        reduction: StepReduction,
        strategy: Strategy,
    ) -> None:
        self._model, self._context, self._forward, self._failed = model, context, forward, failed
        self._strategy = strategy
        self._metrics, self._reduction = metrics, reduction

    @torch.no_grad()
    def one_batch(self, batch: Any) -> EvalResult:
        with self._eval_mode():
            return self._reduction.evaluation(self._forward(batch), self._metrics)

    @torch.no_grad()
    def all_batches(
        self, loader: Any, max_batches: int | None, stop_request: Callable[[], float]
    ) -> tuple[EvalResult, bool, float]:
        """Sums over a loader's batches, whether they were all evaluated, and the requests to stop if not.

        Args:
            stop_request: of this rank, asked before each batch (`results.addend`); one ends all.

        Raises:
            ValueError: on all ranks, when the batches of some end before those of others.
        """
        totals = EvalTotals.zeros(len(self._metrics), self._context.device)
        complete, has_ended, stops = True, False, 0.0
        batches = iter(loader)
        with self._eval_mode():
            for _ in range(max_batches) if max_batches is not None else count():
                goes_on, stops = self._reduction.goes_on(stop_request(), has_ended)
                if not goes_on:
                    complete = has_ended
                    break
                try:
                    batch = next(batches, _NONE)
                except BaseException:
                    self._failed()
                    raise
                has_ended = batch is _NONE
                if not has_ended:
                    totals.add(self._forward(batch))
                else:  # all ranks hear of it before the next batch, or with the sums
                    with self._strategy.forwards():
                        pass
            return self._reduction.evaluation(totals, self._metrics, has_ended), complete, stops

    @contextmanager
    def _eval_mode(self) -> Iterator[None]:
        was_training = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            with self._context, self._strategy.evaluation():
                yield
        finally:
            for module, mode in was_training:  # one by one: a user may have put some into eval mode
                module.training = mode
