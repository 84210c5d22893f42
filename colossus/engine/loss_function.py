"""What the engine asks of a loss function and of a model's metrics: a sum over samples or tokens, and their number."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from colossus.gradients.host_transfer import send_to

log = logging.getLogger("colossus.engine")

#: (outputs of the model, this rank's shard of the microbatch) -> (sum, count), both of this rank
LossFunction = Callable[[Any, Any], tuple[Tensor, Tensor]]

#: what an evaluation itself reports under these names, here and in `colossus evaluate`
_TAKEN = ("loss", "perplexity", "bits_per_byte", "tokens", "images", "checkpoint", "step", "split", "plan", "seconds")


def loss_of(model: nn.Module, loss_fn: LossFunction | None) -> LossFunction:
    """The one that was given to `colossus.initialize`, or the model's own.

    Raises:
        ValueError: when there is none, or it has parameters, which nothing would train.
    """
    function: Any = loss_fn
    while isinstance(function, functools.partial):
        function = function.func
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    if isinstance(owner, nn.Module) and any(param.requires_grad for param in owner.parameters()):
        kind = type(owner).__name__
        raise ValueError(
            f"loss_fn is a {kind} with parameters of its own, which are never trained: the optimizer has those of the "
            f"model. Make it a part of the model (self.criterion = {kind}(...) in its constructor, and a method "
            f"loss(outputs, batch) that calls it); or freeze it with requires_grad_(False)"
        )
    loss: LossFunction | None = loss_fn or getattr(model, "loss", None)
    if loss is None:
        raise ValueError(
            f"{type(model).__name__} has no method loss(outputs, batch), and no loss_fn was given: pass "
            f"loss_fn= to colossus.initialize, or define it; it returns (sum, count)"
        )
    return loss


def metrics_of(model: nn.Module) -> dict[str, LossFunction]:
    """A model's ``eval_metrics``: name -> (outputs, batch) -> (sum, count); none where it has no such attribute.

    Raises:
        ValueError: when it is something else, or has a name that is taken.
    """
    metrics = getattr(model, "eval_metrics", None) or {}
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


def checked_sum(result: Any, what: str = "the loss function") -> tuple[Tensor, Tensor]:
    """What a loss function returned, the count as a tensor.

    Args:
        what: names the function in messages.

    Raises:
        ValueError: when it is no (sum, count).
    """
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)):
        returned = f"one tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(
            f"{what} returned {returned}; it must return (sum, count): the sum of the losses "
            f"of all valid samples or tokens, and their number, so that the mean over the global batch does not "
            f"depend on how it is split. For example: "
            f"F.cross_entropy(logits, labels, reduction='sum'), labels.numel()"
        )
    total, count = result
    if isinstance(count, (int, float)):  # a float is a sum of weights; torch would round it to float32
        wide = torch.float64 if isinstance(count, float) else torch.int64
        count = torch.full((), count, dtype=wide, device=total.device)  # from a number, so nobody waits for a copy
    count = torch.as_tensor(count)
    if total.dim() or count.dim():
        raise ValueError(
            f"{what} returned a sum of shape {tuple(total.shape)} and a count of shape {tuple(count.shape)}; they must "
            f"be scalars: total.sum()"
        )
    if count.device != total.device:
        count = send_to(total.device, count)
    if count.device.type == "cpu" and not 0 <= count.item() < math.inf:
        log.error("%s returned a count of %s", what, count.item())
        count = torch.tensor(math.nan, dtype=torch.float64)  # makes the sum over ranks NaN, which all of them refuse
    return total, count


def check_totals(loss_sum: float, count: float) -> None:
    """Of the global batch, the same on all ranks: raise ValueError when losses cannot be divided by their number."""
    if not 0 <= count < math.inf:
        raise ValueError(
            "the loss function returned a count that is negative, infinite or not a number (on the rank that logged "
            "it): it must be the number of samples or tokens whose losses it summed, 0 or more"
        )
    if count == 0 and loss_sum != 0:
        raise ValueError(
            f"the loss function counted 0 samples or tokens in the global batch, but their losses sum to "
            f"{loss_sum:.6g}: it must return (sum, count) of the same samples or tokens"
        )
