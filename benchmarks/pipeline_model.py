"""The chain of plain torch modules that every case of the pipeline benchmark cuts into the same stages."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.plain import Block
from benchmarks.workload import Workload


class Start(nn.Module):
    """The first module, ids [batch, tokens] -> [batch, tokens, hidden]."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.embedding = nn.Embedding(workload.vocab, workload.hidden)
        self.positions = nn.Embedding(workload.tokens, workload.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) + self.positions.weight


class End(nn.Module):
    """The last module, [batch, tokens, hidden] -> logits [batch, tokens, vocab]."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(workload.hidden)
        self.head = nn.Linear(workload.hidden, workload.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def chain(workload: Workload) -> nn.Sequential:
    """Return start, blocks, end; their values are drawn from torch's own generator."""
    blocks = (Block(workload.hidden, workload.heads) for _ in range(workload.layers))
    return nn.Sequential(Start(workload), *blocks, End(workload))


def filled_chain(workload: Workload) -> nn.Sequential:
    """Return the chain with the values that all cases start from."""
    torch.manual_seed(workload.seed)
    return chain(workload)


def split(layers: int, stages: int) -> list[int]:
    """Return the number of modules of the chain on each stage: as many blocks on all, start and end beside them.

    Raises:
        ValueError: when the blocks do not divide.
    """
    if layers % stages:
        raise ValueError(f"{layers} blocks do not divide into {stages} stages")
    counts = [layers // stages] * stages
    counts[0] += 1
    counts[-1] += 1
    return counts


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
