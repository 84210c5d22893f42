"""What torch offers beside layers: hooks, parametrizations, buffers, generators, autograd functions, scripts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from helpers.user_models.cases import CLASSES, WIDTH, Batch, classify, features, user_model
from helpers.user_models.features import HIDDEN, NO_CHAIN, NO_TOKENS, Block, Stack
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

#: what changes at every forward in training: a step has one for each microbatch
OF_A_FORWARD = dict.fromkeys(("microbatches", "pipeline"), "its state changes with every microbatch")
#: what mixes the samples of a rank
OF_A_RANK = dict.fromkeys(("data", "2d", "2.5d", "3d"), "its statistics are of a rank's samples")


@user_model(features, classify)
class WeightNorm(Stack):
    def __init__(self, kit: Any) -> None:
        super().__init__(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), Block(kit))


@user_model(features, classify, differs=OF_A_FORWARD)
class SpectralNorm(Stack):
    """Its buffers follow the weight, at every forward in training."""

    def __init__(self, kit: Any) -> None:
        super().__init__(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), Block(kit))


@user_model(features, classify, differs=OF_A_FORWARD | OF_A_RANK)
class BatchNorm(Stack):
    def __init__(self, kit: Any) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Block(kit))


@user_model(features, classify, differs=OF_A_FORWARD)
class BatchNormOfAll(Stack):
    """Of the samples of all ranks."""

    def __init__(self, kit: Any) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), kit.BatchNorm1d(WIDTH), Block(kit))


@user_model(features, classify, refused=NO_TOKENS)
class Buffers(Stack):
    """A constant made by the constructor, of random numbers too."""

    class Scaled(nn.Module):
        scale: Tensor
        projection: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
            self.register_buffer("projection", torch.randn(WIDTH, WIDTH) / WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale + x @ self.projection

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Scaled(), Block(kit))


def with_consistency(out: Any, batch: Batch) -> tuple[Tensor, int]:
    logits, target = out
    total, count = classify(logits, batch)
    return total + 0.5 * (logits - target).square().sum(), count


@user_model(features, with_consistency, refused=NO_TOKENS | NO_CHAIN, differs=OF_A_FORWARD)
class EmaTeacher(nn.Module):
    """A copy of the student that follows it at every forward in training."""

    def __init__(self, kit: Any) -> None:
        super().__init__()
        self.student = nn.Linear(WIDTH, CLASSES)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.trunk = Block(kit)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        with torch.no_grad():
            for mine, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.lerp_(other, 0.1)
            target = self.teacher(x)
        return self.student(x), target


@user_model(features, classify, refused=NO_TOKENS)
class GradientHooks(Stack):
    class Hooked(nn.Module):
        def __init__(self, kit: Any) -> None:
            super().__init__()
            self.up, self.down = kit.Linear(WIDTH, HIDDEN, split="column"), kit.Linear(HIDDEN, WIDTH, split="row")
            self.plain = nn.Linear(WIDTH, WIDTH)
            self.plain.weight.register_hook(lambda grad: grad * 0.5)
            self.plain.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2.0,))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.up(x))
            if h.requires_grad:
                h.register_hook(lambda grad: grad * 0.3)
            out: Tensor = x + self.down(h)
            if out.requires_grad:
                out.register_hook(lambda grad: grad * 1.5)
            out = self.plain(out)
            return out

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Hooked(kit), self.Hooked(kit))


@user_model(features, classify)
class GeneratorInConstructor(Stack):
    def __init__(self, kit: Any) -> None:
        generator = torch.Generator().manual_seed(5)
        linears = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        for linear in reversed(linears):
            nn.init.normal_(linear.weight, std=0.2, generator=generator)
        super().__init__(*linears, Block(kit))


@user_model(features, classify)
class CheckpointedReentrant(Stack):
    class Cheap(nn.Module):
        def __init__(self, kit: Any) -> None:
            super().__init__()
            self.stem, self.block = nn.Linear(WIDTH, WIDTH), Block(kit)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.block, self.stem(x), use_reentrant=True)  # type: ignore[no-untyped-call]
            return out

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Cheap(kit), self.Cheap(kit))
