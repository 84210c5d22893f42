"""Where a batch enters a model, and where its loss comes out."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from colossus.context.parallel_context import ParallelContext
from colossus.data.batch import map_batch, shard_of_batch
from colossus.layers.layer import model_parallel_of
from colossus.nest import tensors
from colossus.sequence_parallel.split import SequenceSplit

#: a label that losses ignore
IGNORED = -100


def batch_axes(context: ParallelContext) -> tuple[str, ...]:
    """The axes beside data over which the batch of a model is split at its door."""
    return tuple(
        axis for axis in model_parallel_of(context).regions.user.batch if axis not in context.grid.axes("data")
    )


def local_batch(batch: Any, context: ParallelContext, dtype: torch.dtype, *, pad: bool = False) -> Any:
    """The samples and tokens of a data rank's batch that this rank's model takes, in the precision of the run.

    All samples, or the rank's part in modes that split a batch; under sequence parallelism the rank's tokens. Data of
    float32 would not multiply with weights of float64.

    Args:
        pad: sequences that do not divide are padded.

    Raises:
        ValueError: when samples or tokens do not divide.
    """
    axes = batch_axes(context)
    if axes:
        batch = shard_of_batch(batch, context.index(axes), context.size(axes))
    sequence = model_parallel_of(context).sequence
    if sequence is not None:
        batch = _own_tokens(batch, sequence, pad)
    return map_batch(lambda x: x.to(dtype) if x.is_floating_point() else x, batch)


def note_length(batch: Any, context: ParallelContext) -> None:
    """Let the layers know how long the sequences of a batch are, on every stage of a pipeline."""
    sequence = model_parallel_of(context).sequence
    if sequence is not None:
        sequence.length = num_tokens(batch)


def num_tokens(batch: Any) -> int:
    """Length of the sequences of a batch: dim 1 of what the model is called with.

    Raises:
        ValueError: when no tensor of it has a dim 1.
    """
    found = [x for _, x in tensors(model_input(batch)) if x.dim() > 1]
    if not found:
        raise ValueError(
            "parallel.sequence splits the tokens of a sequence, which are dim 1 of what the model is called with, but "
            "no tensor of it has two dims or more"
        )
    return int(found[0].shape[1])


def _own_tokens(batch: Any, sequence: SequenceSplit, pad: bool) -> Any:
    """Of every tensor whose dim 1 is as long as the sequence the tokens of this rank.

    Where sequences are padded: inputs with 0, whole numbers among the rest (labels) with -100, which losses ignore.
    """
    tokens = num_tokens(batch)
    missing = sequence.padded(tokens) - tokens if pad else 0
    inputs = {id(x) for _, x in tensors(model_input(batch))}

    def take(x: Tensor) -> Tensor:
        if x.dim() < 2 or x.shape[1] != tokens:
            return x
        if missing:
            is_label = id(x) not in inputs and not x.is_floating_point() and x.dtype != torch.bool
            rows = x.new_full((x.shape[0], missing, *x.shape[2:]), IGNORED if is_label else 0)
            x = torch.cat((x, rows), dim=1)
        return sequence.take(x)

    return map_batch(take, batch)


def model_input(batch: Any) -> Any:
    """What the model is called with: ``batch["inputs"]``, the first of a tuple, or the batch itself."""
    if isinstance(batch, dict):
        if "inputs" not in batch:
            raise ValueError(f"a batch that is a dict needs the key 'inputs' for the model; it has {sorted(batch)}")
        return batch["inputs"]
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def fingerprint(batch: Any) -> int:
    """A number that two different batches hardly share: of some values of every tensor on the CPU."""
    found = []
    for _, x in tensors(batch):
        if x.device.type == "cpu" and x.layout is torch.strided:
            flat = x.detach().reshape(-1)
            found.append((tuple(x.shape), flat[:: max(1, flat.numel() // 64)].tolist()))
    return zlib.crc32(repr(found).encode())


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
