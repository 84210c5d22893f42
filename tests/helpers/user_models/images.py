"""Models of images."""

from __future__ import annotations

from typing import Any

import torch
from helpers.user_models.cases import CLASSES, WIDTH, classify, pictures, user_model
from helpers.user_models.features import Block
from helpers.user_models.sequences import OwnAttention
from torch import Tensor, nn

from colossus.layers import PipelineBlock

#: rows of pixels are no tokens
NO_TOKENS = {"sequence": "token"}


@user_model(pictures, classify, refused=NO_TOKENS)
class VisionTransformer(nn.Module):
    """Patches, a class token, positions, the class token's features."""

    def __init__(self, kit: Any) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.attention, self.block = OwnAttention(kit), Block(kit)
        self.head = kit.Linear(WIDTH, CLASSES)

    def embed(self, x: Tensor) -> Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        return torch.cat((self.token.expand(len(x), -1, -1), patches), 1) + self.places

    def mix(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x + self.attention(x))
        return out

    def top(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x[:, 0])
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.mix(self.embed(x)))

    def pipeline_blocks(self) -> list[Any]:
        return [
            PipelineBlock(self.embed, "patch", "token", "places"),
            PipelineBlock(self.mix, "attention", "block"),
            PipelineBlock(self.top, "head"),
        ]
