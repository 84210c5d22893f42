"""What changes how a model is trained: gradients in a forward, parameters without a gradient, other number types."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from helpers.user_models.between_pairs import SPLIT
from helpers.user_models.cases import CLASSES, TOKENS, WIDTH, Batch, classify, draw, features, integers, user_model
from helpers.user_models.features import NO_CHAIN, NO_TOKENS, Block, Stack
from torch import Tensor, nn

from colossus.layers import PipelineBlock


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
class ComplexParameters(Stack):
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.randn(WIDTH, dtype=torch.cdouble))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.turn).real + (x * self.turn).abs()

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Turned(), Block(kit))


class Scaled(torch.autograd.Function):
    """A product with a weight, its gradients by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.t(), x.t() @ grads[0]


@user_model(features, classify, refused=NO_TOKENS)
class OwnMatmul(Stack):
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Scaled.apply(x, self.weight)
            return out

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Product(), Block(kit), self.Product())


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


@user_model(features, classify, refused=NO_TOKENS)
class HyperNetwork(Stack):
    """Weights made for each sample."""

    class Made(nn.Module):
        def __init__(self, kit: Any) -> None:
            super().__init__()
            self.make = kit.Linear(WIDTH, WIDTH * 4)

        def forward(self, x: Tensor) -> Tensor:
            weights = self.make(x).view(len(x), WIDTH, 4)
            return x + torch.bmm(torch.bmm(x[:, None], weights), weights.transpose(1, 2)).squeeze(1)

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Made(kit), Block(kit))


@user_model(features, classify, refused=NO_TOKENS)
class SortedFeatures(Stack):
    class Sorted(nn.Module):
        def __init__(self, kit: Any) -> None:
            super().__init__()
            self.linear = kit.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return h.sort(-1).values.cumsum(-1) / WIDTH + h.flip(-1).roll(1, -1)

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Sorted(kit), self.Sorted(kit))


def lengths(step: int) -> Batch:
    given = {"x": draw(step, 8, TOKENS, WIDTH), "lengths": integers(step, 5, 8) + 3}
    return {"inputs": given, "labels": integers(step, CLASSES, 8), "names": [f"sample {i}" for i in range(8)]}


@user_model(lengths, classify, refused={"sequence": "token"})
class PackedRecurrent(nn.Module):
    """Sequences of several lengths through an LSTM, and its last state."""

    def __init__(self, kit: Any) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True), kit.Linear(WIDTH, CLASSES)

    def bottom(self, given: dict[str, Tensor]) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            given["x"], given["lengths"].cpu(), batch_first=True, enforce_sorted=False
        )
        last: Tensor = self.cell(packed)[1][0]
        return last.sum(0)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.head(self.bottom(given))
        return out

    def pipeline_blocks(self) -> list[Any]:
        return [PipelineBlock(self.bottom, "cell"), self.head]


OF_SOME_SAMPLES = dict.fromkeys(("data", "microbatches", "pipeline", "2d", "2.5d", "3d"), "the mean is of some samples")


@user_model(features, classify, refused=NO_TOKENS, differs=OF_SOME_SAMPLES)
class CentredBatch(Stack):
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Centred(), Block(kit))


@user_model(features, classify, refused=NO_TOKENS)
class InitialisedByNnInit(Stack):
    """`nn.init` on torch's own layers, `init=` for ours is another table's."""

    def __init__(self, kit: Any) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.SELU(), nn.Linear(WIDTH, WIDTH), Block(kit))
        for module in self.modules():
            if type(module) is nn.Linear:
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)


def signs(step: int) -> Batch:
    return {"inputs": draw(step, 8, WIDTH), "labels": integers(step, 2, 8).double()}


def of_signs(logits: Tensor, batch: Batch) -> tuple[Tensor, int]:
    total = F.binary_cross_entropy_with_logits(logits.squeeze(-1), batch["labels"], reduction="sum")
    return total, len(logits)


@user_model(signs, of_signs, refused=NO_TOKENS)
class BinaryHead(nn.Sequential):
    def __init__(self, kit: Any) -> None:
        super().__init__(Block(kit), kit.Linear(WIDTH, 1))
