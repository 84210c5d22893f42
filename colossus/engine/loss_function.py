"""What the engine asks of a loss function: the sum of the losses and their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: (outputs of the model, this rank's shard of the microbatch) -> (sum, count), both of this rank
LossFunction = Callable[[Any, Any], tuple[Tensor, Tensor]]


def checked_loss(result: Any) -> tuple[Tensor, Tensor]:
    """What a loss function returned, the count as a tensor.

    Raises:
        ValueError: when it is no (sum, count).
    """
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)):
        raise ValueError(
            f"the loss function returned {_describe(result)}; it must return (sum, count): the sum of the losses "
            f"of all valid samples or tokens, and their number, so that the mean over the global batch does not "
            f"depend on how it is split. For example: "
            f"F.cross_entropy(logits, labels, reduction='sum'), labels.numel()"
        )
    total, count = result
    if total.dim():
        raise ValueError(f"the loss function returned a sum of shape {tuple(total.shape)}; it must be a scalar")
    return total, torch.as_tensor(count, device=total.device)


def _describe(result: Any) -> str:
    if isinstance(result, Tensor):
        return f"one tensor of shape {tuple(result.shape)}"
    return f"a {type(result).__name__}"
