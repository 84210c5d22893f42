"""A tiny ResNet (He et al., 2016) with the layers of ours or of torch, and of torch a loss by microbatches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossus import layers

SIZES: dict[str, Any] = dict(in_channels=3, image_size=(9, 7), num_classes=6)


class Residual(nn.Module):
    """x [samples, c_in, height, width] -> [samples, c_out, height / stride, width / stride]."""

    def __init__(self, kit: Any, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=False)
        self.bn1 = kit.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.bn2 = kit.BatchNorm2d(c_out)
        self.shortcut = nn.Sequential()
        if stride > 1 or c_in != c_out:
            self.shortcut = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), kit.BatchNorm2d(c_out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Sequential):
    """Images [samples, in_channels, height, width] -> logits [samples, num_classes].

    Args:
        kit: has ``BatchNorm2d`` and ``Linear``.
    """

    def __init__(self, in_channels: int, image_size: tuple[int, int], num_classes: int, kit: Any = layers) -> None:
        stem = nn.Sequential(nn.Conv2d(in_channels, 5, 3, padding=1), kit.BatchNorm2d(5), nn.ReLU())
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        blocks = Residual(kit, 5, 5, 1), Residual(kit, 5, 8, 2), Residual(kit, 8, 8, 1)
        super().__init__(stem, *blocks, pool, kit.Linear(8, num_classes))

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return F.cross_entropy(outputs, batch["labels"], reduction="sum"), len(outputs)


class PlainResNet(ResNet):
    """Of torch alone, in one process: of M microbatches the m-th has every M-th sample."""

    def __init__(self, microbatches: int = 1) -> None:
        super().__init__(**SIZES, kit=nn)
        self.microbatches = microbatches
        self.to(torch.float64)

    def loss_sum(self, images: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        each = [slice(m, None, self.microbatches) for m in range(self.microbatches)]
        losses = [self.loss(self(images[part]), {"labels": labels[part]})[0] for part in each]
        return torch.stack(losses).sum(), len(images)
