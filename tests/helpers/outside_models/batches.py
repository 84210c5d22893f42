"""Batches and losses of the table of models that nobody here wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from helpers.user_models.cases import BATCH, Batch, Loss, draw, integers
from torch import Tensor

#: 8 divides what a mode may split, and the tokens that sequence ranks do; 4 divides the heads
WIDTH, HEADS, INNER, VOCAB, TOKENS, CLASSES = 24, 4, 40, 56, 16, 8


def tokens(step: int) -> Batch:
    """Labels of which every sample has another number that count."""
    labels = integers(step + 1, VOCAB, BATCH, TOKENS)
    for row in range(BATCH):
        labels[row, : (row * 5 + step) % TOKENS] = -100
    return {"inputs": {"input_ids": integers(step, VOCAB, BATCH, TOKENS)}, "labels": labels}


def translations(step: int) -> Batch:
    batch = tokens(step)
    target = integers(step + 2, VOCAB, BATCH, TOKENS)
    return batch | {"inputs": {**batch["inputs"], "decoder_input_ids": target}}


def padded(batch: Callable[[int], Batch], step: int) -> Batch:
    """A batch of tokens whose samples end early, with a mask; what is padding has no label."""
    full = batch(step)
    lengths = TOKENS - torch.arange(BATCH) % 3 - step % 2
    mask = (torch.arange(TOKENS) < lengths[:, None]).long()
    masks = {name.replace("input_ids", "attention_mask"): mask for name in full["inputs"] if "ids" in name}
    return {"inputs": full["inputs"] | masks, "labels": full["labels"].masked_fill(mask == 0, -100)}


def images(height: int, width: int, name: str = "") -> Callable[[int], Batch]:
    """Pictures and their classes.

    Args:
        name: of the model's argument; by default they are its only one.
    """

    def batch(step: int) -> Batch:
        pixels = draw(step, BATCH, 3, height, width)
        return {"inputs": {name: pixels} if name else pixels, "labels": integers(step, CLASSES, BATCH)}

    return batch


def vectors(name: str, *shape: int) -> Callable[[int], Batch]:
    """Numbers of a shape for each sample, and a class."""

    def batch(step: int) -> Batch:
        return {"inputs": {name: draw(step, BATCH, *shape)}, "labels": integers(step, CLASSES, BATCH)}

    return batch


def both(*parts: Callable[[int], Batch]) -> Callable[[int], Batch]:
    """The arguments of several, with the labels of the last."""

    def batch(step: int) -> Batch:
        batches = [part(step) for part in parts]
        inputs: dict[str, Tensor] = {}
        for each in batches:
            inputs |= each["inputs"]
        return {"inputs": inputs, "labels": batches[-1]["labels"]}

    return batch


def targets(outputs: Any, batch: Batch) -> tuple[Tensor, int]:
    """The cross-entropy of logits with the batch's labels."""
    logits, labels = outputs if isinstance(outputs, Tensor) else outputs.logits, batch["labels"]
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    return total, int((labels != -100).sum())


def distances(*names: str) -> Loss:
    """The distance of some outputs from a ramp, of each sample.

    Args:
        names: of the outputs; none for a model that returns a tensor.
    """

    def loss(outputs: Any, batch: Batch) -> tuple[Tensor, int]:
        values = [getattr(outputs, name) for name in names] or [outputs]
        total = sum(((x - _ramp(x)).square().sum() for x in values), start=torch.zeros(()))
        return total, values[0].shape[0]

    return loss


def _ramp(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype)
