"""What changes how a model is trained: gradients in a forward, parameters without a gradient, other number types."""

from __future__ import annotations

from typing import Any

import torch
from helpers.user_models.between_pairs import SPLIT
from helpers.user_models.cases import WIDTH, Batch, classify, features, user_model
from helpers.user_models.features import NO_CHAIN, NO_TOKENS, Block, Stack
from torch import Tensor, nn


def of_forces(forces: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return (forces - 0.1).square().sum(), forces.shape[0]


@user_model(features, of_forces, refused=NO_TOKENS | NO_CHAIN)
class PlainForces(nn.Module):
    """The gradient of an energy with regard to the input, which is trained: a backward of a backward."""

    def __init__(self, kit: Any) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (out,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return -out


TWICE = dict.fromkeys(SPLIT, "is to be differentiated again") | {"pipeline 2 x 1d": NO_CHAIN["pipeline"]}


@user_model(features, of_forces, refused=NO_TOKENS | NO_CHAIN | TWICE)
class ForcesOfOurs(nn.Module):
    def __init__(self, kit: Any) -> None:
        super().__init__()
        self.up, self.down = kit.Linear(WIDTH, WIDTH, split="column"), kit.Linear(WIDTH, 4, split="row")

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.down(torch.tanh(self.up(x))).square().sum()
            (out,) = torch.autograd.grad(energy, x, create_graph=True)
        return -out


@user_model(features, classify, refused=NO_TOKENS)
class UnusedParameters(Stack):
    class Idle(nn.Module):
        def __init__(self, kit: Any) -> None:
            super().__init__()
            self.block, self.idle, self.never = Block(kit), nn.Linear(WIDTH, WIDTH), kit.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.block(x)
            return out

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Idle(kit), self.Idle(kit))


@user_model(features, classify, refused=NO_TOKENS)
class TopExperts(Stack):
    """Top 2 of 4 experts by gather and scatter, as plain torch."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            scores, chosen = self.router(x).topk(2, -1)
            each = torch.einsum("bi,bkij->bkj", x, self.experts[chosen])
            return x + (scores.softmax(-1).unsqueeze(-1) * each).sum(1)

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Routed(), Block(kit))
