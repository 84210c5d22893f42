"""The parts of a batch: what a model takes as its input, and what the loss alone reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from colossus.nest import tensors

#: keys of a batch that is a dict: the model's input, and the labels, which only the loss reads
INPUTS, LABELS = "inputs", "labels"
#: label that losses ignore
IGNORED = -100


def names_arguments(batch: Any) -> bool:
    """Return whether a batch is a dict of the model's keyword arguments: one without the key "inputs"."""
    return isinstance(batch, Mapping) and INPUTS not in batch


def model_input(batch: Any) -> Any:
    """Return the model's input: ``batch["inputs"]``, the first entry of a tuple, or the batch itself.

    For a dict without "inputs" it is all entries but the labels; the engine selects those that the model takes.
    """
    if names_arguments(batch):
        return {key: value for key, value in batch.items() if key != LABELS}
    if isinstance(batch, Mapping):
        return batch[INPUTS]
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def sequence_length(batch: Any) -> int:
    """Return the tokens of each sequence of a batch: dim 1 of the model's input.

    Raises:
        ValueError: if no tensor of it has a dim 1.
    """
    for _, x in tensors(model_input(batch)):
        if x.dim() > 1:
            return int(x.shape[1])
    raise ValueError(
        "parallel.sequence and train.tokens_per_microbatch need tokens in dim 1 of the model's input, but no tensor of "
        "it has two dims"
    )


def padding_values(batch: Any) -> Iterator[int]:
    """Yield the value of padding in each tensor: -100 in integers beside the model's input (labels), else 0."""
    if names_arguments(batch):
        beside = [f"[{LABELS!r}]"]
    elif isinstance(batch, Mapping):
        beside = [f"[{key!r}]" for key in batch if key != INPUTS]
    else:
        beside = [f"[{number}]" for number in range(1, len(batch))] if isinstance(batch, tuple | list) else []
    for path, x in tensors(batch):
        is_label = path.startswith(tuple(beside)) and not x.is_floating_point() and x.dtype != torch.bool
        yield IGNORED if is_label else 0
