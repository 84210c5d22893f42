"""What the engine asks of a loss function: the sum of the losses and their number."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from colossus.gradients.host_transfer import send_to

log = logging.getLogger("colossus.engine")

#: (outputs of the model, this rank's shard of the microbatch) -> (sum, count), both of this rank
LossFunction = Callable[[Any, Any], tuple[Tensor, Tensor]]


def require_no_parameters(loss_fn: LossFunction) -> None:
    """That a loss function passed to `colossus.initialize` has nothing that would have to be trained.

    Raises:
        ValueError: for a module with trainable parameters, a method of one, and a partial of these.
    """
    function: Any = loss_fn
    while isinstance(function, functools.partial):
        function = function.func
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    if not isinstance(owner, nn.Module):
        return
    names = [name for name, param in owner.named_parameters() if param.requires_grad]
    if names:
        kind, shown = type(owner).__name__, ", ".join(names[:4]) + ", ..." * (len(names) > 4)
        raise ValueError(
            f"loss_fn is a {kind} with parameters of its own ({shown}), which are never trained: the optimizer has "
            f"those of the model. Make it a part of the model (self.criterion = {kind}(...) in its constructor, and a "
            f"method loss(outputs, batch) that calls it); or freeze it with requires_grad_(False)"
        )


def checked_sum(result: Any, what: str = "the loss function") -> tuple[Tensor, Tensor]:
    """What a loss function returned, the count as a tensor.

    Args:
        what: names the function in messages.

    Raises:
        ValueError: when it is no (sum, count).
    """
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)):
        raise ValueError(
            f"{what} returned {_describe(result)}; it must return (sum, count): the sum of the losses "
            f"of all valid samples or tokens, and their number, so that the mean over the global batch does not "
            f"depend on how it is split. For example: "
            f"F.cross_entropy(logits, labels, reduction='sum'), labels.numel()"
        )
    total, count = result
    if total.dim():
        raise ValueError(f"{what} returned a sum of shape {tuple(total.shape)}; it must be a scalar: total.sum()")
    if isinstance(count, (int, float)):  # a float is a sum of weights; torch would round it to float32
        wide = torch.float64 if isinstance(count, float) else torch.int64
        count = torch.full((), count, dtype=wide, device=total.device)  # from a number, so nobody waits for a copy
    count = torch.as_tensor(count)
    if count.device != total.device:
        count = send_to(total.device, count)
    if count.dim():
        raise ValueError(f"{what} returned a count of shape {tuple(count.shape)}; it must be a scalar")
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


def _describe(result: Any) -> str:
    if isinstance(result, Tensor):
        return f"one tensor of shape {tuple(result.shape)}"
    return f"a {type(result).__name__}"
