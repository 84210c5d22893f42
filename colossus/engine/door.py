"""Where a batch enters a model, and where its loss comes out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colossus.context.parallel_context import ParallelContext
from colossus.data.batch import map_batch, share_of_batch
from colossus.layers.layer import plan_of


def door_axes(context: ParallelContext) -> tuple[str, ...]:
    """The axes beside data over which the batch of a model is split at its door."""
    return tuple(axis for axis in plan_of(context).regions.user.batch if axis not in context.grid.axes("data"))


def own_part(batch: Any, context: ParallelContext, dtype: torch.dtype) -> Any:
    """The samples of a data rank's batch that this rank's model takes, in the precision of the run.

    All of them, or the rank's part in modes that split a batch. Data of float32 would not multiply with weights of
    float64.

    Raises:
        ValueError: when the samples do not divide.
    """
    axes = door_axes(context)
    if axes:
        batch = share_of_batch(batch, context.index(axes), context.size(axes))
    return map_batch(lambda x: x.to(dtype) if x.is_floating_point() else x, batch)


def model_input(batch: Any) -> Any:
    """What the model is called with: ``batch["inputs"]``, the first of a tuple, or the batch itself."""
    if isinstance(batch, dict):
        if "inputs" not in batch:
            raise ValueError(f"a batch that is a dict needs the key 'inputs' for the model; it has {sorted(batch)}")
        return batch["inputs"]
    return batch[0] if isinstance(batch, (tuple, list)) else batch


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
