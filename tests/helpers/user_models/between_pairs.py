"""What people write between a column and a row linear, and with the weights of layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from helpers.user_models.cases import WIDTH, Batch, classify, features, user_model
from helpers.user_models.features import HIDDEN, NO_TOKENS, Block, Stack
from torch import Tensor, nn

from colossus.layers import PipelineBlock

#: the plans under which features between a pair are split
SPLIT = ("1d", "2d", "2.5d", "3d", "data 2 x 1d", "pipeline 2 x 1d")


class Pair(nn.Module):
    """down(between(up(x))), and x."""

    def __init__(self, kit: Any) -> None:
        super().__init__()
        self.up, self.down = kit.Linear(WIDTH, HIDDEN, split="column"), kit.Linear(HIDDEN, WIDTH, split="row")

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.between(self.up(x)))
        return out


@user_model(features, classify, refused=NO_TOKENS)
class ManyPointwise(Stack):
    class Zoo(Pair):
        def between(self, h: Tensor) -> Tensor:
            h = F.leaky_relu(h, 0.1) + h**3 * 0.1 - h.square().log1p()
            h = h.masked_fill(h < -1.0, 0.5).addcmul(h, h.sigmoid(), value=0.3)
            h = h + (h.round() - h).detach()
            h = torch.lerp(h, F.softplus(h), 0.25) / (1.0 + h.abs())
            return torch.where(h.isnan(), torch.zeros_like(h), h).clone().contiguous().to(h.dtype)

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Zoo(kit), self.Zoo(kit))


@user_model(features, classify, refused=NO_TOKENS)
class LearnedScaleBetween(Stack):
    class Scaled(Pair):
        def __init__(self, kit: Any) -> None:
            super().__init__(kit)
            self.scale = nn.Parameter(torch.ones(HIDDEN))

        def between(self, h: Tensor) -> Tensor:
            return h * self.scale

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Scaled(kit), Block(kit))


@user_model(features, classify, refused=NO_TOKENS)
class ViewIntoHeads(Stack):
    class Viewed(Pair):
        def between(self, h: Tensor) -> Tensor:
            return h.view(len(h), 4, h.shape[-1] // 4).softmax(-1).reshape(h.shape)

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Viewed(kit), Block(kit))


def with_penalty(out: Any, batch: Batch) -> tuple[Tensor, int]:
    logits, penalty = out
    total, count = classify(logits, batch)
    return total + 0.1 * penalty * count, count


@user_model(features, with_penalty, refused=NO_TOKENS | dict.fromkeys(SPLIT, "the parameter itself"))
class PenaltyOnOurWeights(Stack):
    """Weight decay by hand: the sum of squares of a weight of which a rank has a part."""

    def __init__(self, kit: Any) -> None:
        super().__init__(kit.Linear(WIDTH, WIDTH))

    def pipeline_blocks(self) -> list[Any]:
        return [PipelineBlock(lambda x: x), PipelineBlock(self.forward, "blocks", "head")]

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.blocks[0].weight.square().sum()
