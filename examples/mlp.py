"""Three spirals told apart by an MLP that is written as for torch.nn: only the import is another.

colossus launch examples/mlp.py                                                   # one process
colossus launch examples/mlp.py parallel.tensor.mode=2d parallel.tensor.size=4    # the same run on four
"""

import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from colossus.layers import LayerNorm, Linear  # from torch.nn import LayerNorm, Linear


class Block(nn.Module):
    """x + down(gelu(up(norm(x)))), x [batch, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = LayerNorm(width)
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class MLP(nn.Module):
    """Points [batch, 2] -> logits [batch, classes]."""

    def __init__(self, width: int = 64, depth: int = 2, classes: int = 3) -> None:
        super().__init__()
        self.enter = Linear(2, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.leave = Linear(width, classes)

    def forward(self, points: Tensor) -> Tensor:
        return self.leave(self.blocks(self.enter(points)))

    def loss(self, logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        """Sum of the losses, and their number: the engine takes the mean over the global batch."""
        _, labels = batch
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()


def spirals(split: str = "train", samples: int = 4096) -> TensorDataset:
    """Noisy points [2] on three arms that wind once around the origin, with the number of the arm."""
    generator = torch.Generator().manual_seed(0 if split == "train" else 1)
    arm = torch.randint(3, (samples,), generator=generator)
    radius = torch.rand(samples, generator=generator)
    angle = 2 * math.pi * (arm / 3 + radius) + 0.2 * torch.randn(samples, generator=generator)
    return TensorDataset(torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1), arm)


model = dict(type=MLP)
data = dict(type=spirals)
optimizer = dict(type="AdamW", lr=3e-3)
lr_schedule = dict(type="cosine", warmup_steps=10)
train = dict(steps=200, global_batch_size=128, clip_grad_norm=1.0, log_every=20, eval_every=200)

if __name__ == "__main__":  # python examples/mlp.py parallel.tensor=2, or under torchrun
    from colossus.cli.main import main

    sys.exit(main(["launch", *sys.argv]))
