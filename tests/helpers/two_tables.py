"""A small model with two tables of sparse gradients, a layer of ours and one of torch's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossus import layers

ROWS, DIM, CLASSES, LENGTH = 37, 6, 5, 3


class Words(nn.Module):
    """ids [samples, LENGTH] -> [samples, CLASSES]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(ROWS, DIM, padding_idx=2, sparse=True)
        self.plain = nn.Embedding(ROWS, DIM, sparse=True)
        self.out = layers.Linear(DIM, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.table(ids) + self.plain(ids // 2)).mean(1))


def loss_fn(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)


def batch_of(step: int, samples: int, index: int, count: int) -> tuple[Tensor, Tensor]:
    """The part of data rank ``index`` of ``count``: ids and classes."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, ROWS, (samples, LENGTH), generator=generator)
    classes = torch.randint(0, CLASSES, (samples,), generator=generator)
    part = samples // count
    return ids[index * part : (index + 1) * part], classes[index * part : (index + 1) * part]
