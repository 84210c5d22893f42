"""Evaluation: batches run forward only, with the model in eval mode, and their losses summed over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.data_parallel.strategy import Strategy
from colossus.engine.loss_function import check_totals
from colossus.engine.optimizer_step import loss_axes
from colossus.engine.results import EvalResult

_NONE = object()


class Evaluation:
    """Evaluates a model.

    Args:
        metrics: names of what is summed beside the loss.
        forward: runs a batch of this rank forward: sums and counts of the loss and of each metric, of this rank, not
            yet over ranks: float64 [1 + metrics, 2].
    """

    def __init__(
        self,
        model: nn.Module,
        metrics: Sequence[str],
        context: ParallelContext,
        strategy: Strategy,
        forward: Callable[[Any], Tensor],
    ) -> None:
        self._model, self._metrics, self._context = model, metrics, context
        self._strategy, self._forward = strategy, forward
        self._loss_group, self._world = context.group(loss_axes(context)), context.group(context.grid.names)

    @torch.no_grad()
    def one_batch(self, batch: Any) -> EvalResult:
        with self._eval_mode():
            return self._result(self._forward(batch))

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
        totals = torch.zeros(1 + len(self._metrics), 2, dtype=torch.float64, device=self._context.device)
        complete, has_ended, stops = True, False, 0.0
        batches = iter(loader)
        with self._eval_mode():
            for _ in range(max_batches) if max_batches is not None else count():
                asked = torch.tensor([stop_request(), has_ended], dtype=torch.float32, device=self._context.device)
                stops, ended = collectives.all_reduce(asked, self._world, owned=True).wait().tolist()
                _check_all_ended(ended, self._world)
                if stops or ended:
                    complete = has_ended
                    break
                batch = next(batches, _NONE)
                has_ended = batch is _NONE
                if not has_ended:
                    totals += self._forward(batch)
                else:  # all ranks hear of it before the next batch, or with the sums
                    with self._strategy.forwards():
                        pass
            return self._result(totals, has_ended), complete, stops

    def _result(self, totals: Tensor, has_ended: bool = False) -> EvalResult:
        """Sums over all ranks.

        Raises:
            ValueError: on all ranks alike, see `all_batches` and `check_totals`.
        """
        numbers = torch.cat((totals.flatten(), totals.new_full((1,), float(has_ended))))
        numbers = collectives.all_reduce(numbers, self._loss_group, owned=True).wait()
        total, tokens, *of_metrics, ended = numbers.tolist()
        _check_all_ended(ended, self._loss_group)
        check_totals(total, tokens)
        pairs = zip(of_metrics[::2], of_metrics[1::2], strict=True)
        return EvalResult(total, tokens, dict(zip(self._metrics, pairs, strict=True)))

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


def _check_all_ended(ended: float, group: AxisGroup) -> None:
    if 0 < ended < group.size:
        raise ValueError(
            f"the validation data ended on {ended:.0f} of {group.size} ranks after fewer batches than on the others: "
            f"with data.validation per_rank, or a DistributedSampler, every data rank must give as many. Set "
            f"train.eval_batches to the smallest number, or let the sampler fill up or drop what is left over"
        )
