"""Models of vectors of features."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from helpers.user_models.cases import CLASSES, WIDTH, Batch, classify, draw, features, integers, user_model
from torch import Tensor, nn

from colossus.layers import PipelineBlock

#: of a model on [batch, features] under parallel.sequence
NO_TOKENS = {"sequence": "token"}
NO_CHAIN = {"pipeline": "does not define its pipeline blocks"}
HIDDEN = 16


@user_model(features, classify, refused=NO_TOKENS)
class Perceptron(nn.Sequential):
    def __init__(self, kit: Any) -> None:
        super().__init__(
            kit.Linear(WIDTH, HIDDEN, split="column"),
            nn.ReLU(inplace=True),
            kit.Linear(HIDDEN, WIDTH, split="row"),
            nn.Linear(WIDTH, CLASSES),
        )


class Block(nn.Module):
    def __init__(self, kit: Any) -> None:
        super().__init__()
        self.norm = kit.LayerNorm(WIDTH)
        self.up, self.down = kit.Linear(WIDTH, HIDDEN, split="column"), kit.Linear(HIDDEN, WIDTH, split="row")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks and a head, as a chain."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def pipeline_blocks(self) -> list[Any]:
        return [*self.blocks, self.head]


@user_model(features, classify, refused=NO_TOKENS)
class Gated(Stack):
    """GLU: two column linears meet element by element."""

    class Glu(nn.Module):
        def __init__(self, kit: Any) -> None:
            super().__init__()
            self.gate = kit.Linear(WIDTH, HIDDEN, bias=False, split="column")
            self.up = kit.Linear(WIDTH, HIDDEN, bias=False, split="column")
            self.down = kit.Linear(HIDDEN, WIDTH, bias=False, split="row")

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
            return out

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Glu(kit), self.Glu(kit))


@user_model(features, classify, refused=NO_TOKENS)
class RowsByMask(Stack):
    """Hard routing: an expert gets the samples that chose it; torch's layers take any number."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                mine = (x[:, 0] > 0).long() == number
                out[mine] = expert(x[mine])
            return out

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Routed(), Block(kit))


def two_losses(out: Any, batch: Batch) -> tuple[Tensor, int]:
    total, count = classify(out["logits"], batch)
    return total + 0.1 * out["size"].square().sum(), count


@user_model(features, two_losses, refused=NO_TOKENS)
class TwoHeads(nn.Module):
    """A dict of outputs, a loss of two terms."""

    def __init__(self, kit: Any) -> None:
        super().__init__()
        self.trunk = Block(kit)
        self.heads = nn.ModuleDict({"logits": kit.Linear(WIDTH, CLASSES), "size": nn.Linear(WIDTH, 1)})

    def top(self, x: Tensor) -> dict[str, Tensor]:
        return {name: head(x) for name, head in self.heads.items()}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.top(self.trunk(x))

    def pipeline_blocks(self) -> list[Any]:
        return [self.trunk, PipelineBlock(self.top, "heads")]


def pairs(step: int) -> Batch:
    given = {"left": draw(step, 8, WIDTH), "right": draw(step + 5, 8, 6)}
    return {"inputs": given, "labels": integers(step, CLASSES, 8)}


@user_model(pairs, classify, refused=NO_TOKENS)
class TwoInputs(nn.Module):
    def __init__(self, kit: Any) -> None:
        super().__init__()
        self.left, self.right = kit.Linear(WIDTH, WIDTH), nn.Linear(6, WIDTH)
        self.both = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def bottom(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.left(given["left"]), self.right(given["right"]).tanh()

    def top(self, sides: tuple[Tensor, Tensor]) -> Tensor:
        joined = torch.cat((self.both(*sides), sides[0] - sides[1]), -1)
        out: Tensor = self.head(joined)
        return out

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return self.top(self.bottom(given))

    def pipeline_blocks(self) -> list[Any]:
        return [PipelineBlock(self.bottom, "left", "right"), PipelineBlock(self.top, "both", "head")]


@user_model(features, classify, refused=NO_TOKENS)
class SharedBlock(nn.Module):
    """One block three times."""

    def __init__(self, kit: Any) -> None:
        super().__init__()
        self.block, self.head = Block(kit), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block(x)
        out: Tensor = self.head(x)
        return out

    def pipeline_blocks(self) -> list[Any]:
        return [self.block, self.block, self.block, self.head]


@user_model(features, classify, refused=NO_TOKENS)
class TiedByHand(Stack):
    """Two layers with one weight."""

    def __init__(self, kit: Any) -> None:
        a, b = kit.Linear(WIDTH, WIDTH), kit.Linear(WIDTH, WIDTH)
        b.weight = a.weight
        super().__init__(a, nn.Tanh(), b)


@user_model(features, classify, refused=NO_TOKENS)
class WrittenInPlace(Stack):
    class Inside(nn.Module):
        def __init__(self, kit: Any) -> None:
            super().__init__()
            self.up, self.down = kit.Linear(WIDTH, HIDDEN, split="column"), kit.Linear(HIDDEN, WIDTH, split="row")

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            h *= 0.5
            h.clamp_(min=-1.0).relu_()
            out: Tensor = self.down(h)
            out += x
            out.mul_(0.9).add_(0.1)
            return out

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Inside(kit), self.Inside(kit))


_SUM = dict.fromkeys(("1d", "2d", "2.5d", "3d 8", "data 2 x 1d", "pipeline 2 x 1d"), "sum reduces dim -1")


@user_model(features, classify, refused=NO_TOKENS | _SUM)
class NormInsideOfAPair(Stack):
    """Wrong on a part of the features: a hand-written norm between a column and a row linear."""

    class Inside(nn.Module):
        def __init__(self, kit: Any) -> None:
            super().__init__()
            self.up, self.down = kit.Linear(WIDTH, HIDDEN, split="column"), kit.Linear(HIDDEN, WIDTH, split="row")

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            out: Tensor = self.down(h / h.sum(-1, keepdim=True).abs().add(1.0))
            return out

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Inside(kit), Block(kit))
