"""The contract of loss functions and of a model's metrics: a sum over samples or tokens, and their number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from colossus.comm.host_transfer import send_to

_NUMBERS = (np.integer, np.floating)
#: (outputs of the model, this rank's shard of the microbatch) -> (sum, count) of this rank
LossFunction = Callable[[Any, Any], tuple[Tensor, Tensor]]


def loss_of(model: nn.Module, loss_fn: LossFunction | None) -> LossFunction:
    """Return the loss function that was passed to `colossus.initialize`, or the model's own.

    Raises:
        ValueError: if there is none, or it has parameters, which nothing would train; or the model has an objective.
    """
    if loss_fn is not None and getattr(getattr(model, "options", None), "objective", None) is not None:
        raise ValueError(
            "loss_fn: model.objective is the model's loss: leave one of them out. A loss of your own beside a frozen "
            "model takes its log-probabilities from the batch"
        )
    if isinstance(loss_fn, nn.Module) and any(param.requires_grad for param in loss_fn.parameters()):
        kind = type(loss_fn).__name__
        raise ValueError(
            f"loss_fn is a {kind} with parameters of its own, which are never trained: make it a part of the model, "
            f"with a method loss(outputs, batch) that calls it"
        )
    loss: LossFunction | None = loss_fn or getattr(model, "loss", None)
    if loss is None:
        raise ValueError(
            f"{type(model).__name__} has no method loss(outputs, batch), and no loss_fn was passed: define the "
            f"method (under `colossus launch`), or pass loss_fn= to colossus.initialize; it returns (sum, count)"
        )
    return loss


class EvalMetrics:
    """The metrics of a model, and their sums over the microbatches that this rank has evaluated.

    They are its ``eval_metrics``, if it has that attribute: name -> (outputs, batch) -> (sum, count), like a loss
    function.

    Args:
        model: the rank's part of the model.
        device: device of the sums.

    Attributes:
        names: names, the same on all ranks, also on those that never see an output.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._functions: dict[str, LossFunction] = dict(getattr(model, "eval_metrics", None) or {})
        self.names = tuple(self._functions)
        self._sums = torch.zeros(len(self.names), 2, dtype=torch.float64, device=device)

    def add(self, outputs: Any, batch: Any, ways: int) -> None:
        """Add the sums of a microbatch, which ``ways`` ranks compute alike."""
        for row, (name, function) in zip(self._sums, self._functions.items(), strict=True):
            total, count = checked_sum(function(outputs, batch), f"the metric {name!r}")
            row += torch.stack((total.double(), count.double())) / ways

    def take(self) -> Tensor:
        """Return the sums since the last call, float64 [metrics, 2]."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        return sums


def checked_sum(result: Any, what: str = "the loss function") -> tuple[Tensor, Tensor]:
    """Return the sum and the count of a loss function, the count as a tensor.

    Args:
        result: result of the function.
        what: name of the function in messages.

    Raises:
        ValueError: if it is no (sum, count), or the count is negative or not finite.
    """
    is_pair = isinstance(result, (tuple, list)) and len(result) == 2
    if not (is_pair and isinstance(result[0], Tensor) and isinstance(result[1], (Tensor, int, float, *_NUMBERS))):
        raise ValueError(
            f"{what} returned {_described(result)}; it must return (sum, count): the sum of the losses "
            f"of all valid samples or tokens, and their number, so that the mean over the global batch does not "
            f"depend on how it is split. For example: "
            f"F.cross_entropy(logits, labels, reduction='sum'), labels.numel()"
        )
    total, count = result
    if not isinstance(count, Tensor):  # a float is a sum of weights, which torch would round to float32
        wide = torch.float64 if isinstance(count, (float, np.floating)) else torch.int64
        count = torch.full((), count, dtype=wide, device=total.device)  # filled from a number, which needs no copy
    if total.dim() or count.dim():
        raise ValueError(
            f"{what} returned a sum of shape {tuple(total.shape)} and a count of shape {tuple(count.shape)}; they must "
            f"be scalars: total.sum()"
        )
    if count.device != total.device:
        count = send_to(total.device, count)
    if count.device.type == "cpu" and not 0 <= count.item() < math.inf:
        raise ValueError(
            f"{what} returned a count of {count.item()}; it must be the number of samples or tokens whose losses it "
            f"summed, 0 or more"
        )
    return total, count


def shared_sum(total: Tensor, count: Tensor, ways: int) -> tuple[Tensor, Tensor]:
    """Return this rank's share of a sum and a count that ``ways`` ranks have computed alike, and that ranks add up."""
    return (total, count) if ways == 1 else (total / ways, count.double() / ways)


def _described(result: Any) -> str:
    """Return a description of a result for an error."""
    if isinstance(result, Tensor):
        return f"one tensor of shape {tuple(result.shape)}"
    if isinstance(result, (tuple, list)):
        return f"({', '.join(_described(entry) for entry in result)})"
    return f"a {type(result).__module__}.{type(result).__name__}".replace("a builtins.", "a ")
