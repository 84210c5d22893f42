"""What an evaluation reports beside the loss: metrics of a model, summed over the data as the loss is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colossus.engine.loss_function import LossFunction, checked_sum

#: what an evaluation itself reports under these names, here and in `colossus evaluate`
_TAKEN = ("loss", "perplexity", "bits_per_byte", "tokens", "images", "checkpoint", "step", "split", "plan", "seconds")


@dataclass
class EvalTotals:
    """Sums of a rank over the batches of an evaluation, not yet over ranks.

    Attributes:
        loss_sum, count: float64 scalars.
        metrics: sum and count of each metric, float64 [metrics, 2].
    """

    loss_sum: Tensor
    count: Tensor
    metrics: Tensor

    @classmethod
    def zeros(cls, num_metrics: int, device: torch.device) -> EvalTotals:
        loss_sum, count = torch.zeros(2, dtype=torch.float64, device=device)
        return cls(loss_sum, count, torch.zeros(num_metrics, 2, dtype=torch.float64, device=device))

    def add(self, other: EvalTotals) -> None:
        self.loss_sum += other.loss_sum
        self.count += other.count
        self.metrics += other.metrics


class EvalMetrics:
    """The metrics of a model, and their sums over the microbatches that this rank has evaluated.

    Args:
        functions: name -> (outputs of the model, this rank's shard of the batch) -> (sum, count), as a loss function.

    Attributes:
        names: the same on all ranks, also on those that never see an output.
    """

    def __init__(self, functions: Mapping[str, LossFunction], device: torch.device) -> None:
        self._functions = dict(functions)
        self.names = tuple(functions)
        self._sums = torch.zeros(len(self.names), 2, dtype=torch.float64, device=device)

    def add(self, outputs: Any, batch: Any) -> None:
        """The sums of a microbatch."""
        for row, (name, function) in zip(self._sums, self._functions.items(), strict=True):
            total, count = checked_sum(function(outputs, batch), f"the metric {name!r}")
            row += torch.stack((total.double(), count.double()))

    def take(self) -> Tensor:
        """The sums since the last call, float64 [metrics, 2]."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        return sums


def metrics_of(model: nn.Module) -> dict[str, LossFunction]:
    """A model's ``eval_metrics``: name -> (outputs, batch) -> (sum, count); none where it has no such attribute.

    Raises:
        ValueError: when it is something else, or has a name that is taken.
    """
    metrics = getattr(model, "eval_metrics", None)
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping) or not all(isinstance(k, str) and callable(f) for k, f in metrics.items()):
        raise ValueError(
            f"{type(model).__name__}.eval_metrics is a {type(metrics).__name__}; it must be a dict of name -> function "
            f"of (outputs, batch) that returns (sum, count), as loss does"
        )
    for name in metrics:
        if name.replace(" ", "_") in _TAKEN:
            raise ValueError(
                f"{type(model).__name__}.eval_metrics has the name {name!r}, which is taken: an evaluation itself "
                f"reports it; give it another (taken: {', '.join(_TAKEN)})"
            )
    return dict(metrics)
