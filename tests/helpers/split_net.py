"""A small network split over tensor ranks, and the same in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from colossus import layers


class Split(nn.Module):
    """Split over tensor ranks; beside them a plain parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = layers.Linear(5, 6, split="column")
        self.down = layers.Linear(6, 3, split="row")
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.down(self.up(x))


class Plain(nn.Module):
    """The same in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 6, dtype=torch.float64), nn.Linear(6, 3, dtype=torch.float64)
        self.gain = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.gain * self.down(self.up(x))
        return result
