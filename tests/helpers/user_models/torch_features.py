"""What torch offers beside layers: hooks, parametrizations, buffers, generators, autograd functions, scripts."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from helpers.user_models.cases import CLASSES, WIDTH, Batch, classify, draw, features, integers, user_model
from helpers.user_models.features import HIDDEN, NO_CHAIN, NO_TOKENS, Block, Stack
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

#: what changes at every forward in training: a step has one for each microbatch
OF_A_FORWARD = dict.fromkeys(("microbatches", "pipeline"), "its state changes with every microbatch")
#: what mixes the samples of a rank
OF_A_RANK = dict.fromkeys(("data", "2d", "2.5d", "3d"), "its statistics are of a rank's samples")


@user_model(features, classify, refused=NO_TOKENS)
class WeightNorm(Stack):
    def __init__(self, kit: Any) -> None:
        super().__init__(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), Block(kit))


@user_model(features, classify, refused=NO_TOKENS)
class Orthogonal(Stack):
    def __init__(self, kit: Any) -> None:
        super().__init__(parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), Block(kit))


@user_model(features, classify, refused=NO_TOKENS, differs=OF_A_FORWARD)
class SpectralNorm(Stack):
    def __init__(self, kit: Any) -> None:
        super().__init__(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), Block(kit))


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@user_model(features, classify, refused=NO_TOKENS)
class Parametrized(Stack):
    def __init__(self, kit: Any) -> None:
        linear = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(linear, "weight", Symmetric())
        super().__init__(linear, Block(kit))


@user_model(features, classify, refused=NO_TOKENS, differs=OF_A_FORWARD | OF_A_RANK)
class BatchNorm(Stack):
    def __init__(self, kit: Any) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Block(kit))


@user_model(features, classify, refused=NO_TOKENS)
class GroupNormAndPrelu(Stack):
    def __init__(self, kit: Any) -> None:
        super().__init__(kit.Linear(WIDTH, WIDTH), nn.GroupNorm(2, WIDTH), nn.PReLU(), Block(kit))


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


@user_model(features, classify, refused=NO_TOKENS)
class ForwardHooks(Stack):
    def __init__(self, kit: Any) -> None:
        block = Block(kit)
        block.norm.register_forward_hook(lambda module, inputs, out: out * 1.1)
        block.up.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0.1,))
        super().__init__(block, Block(kit))


@user_model(
    features, classify, refused=NO_TOKENS, differs={"": "a hook sees the gradient of a rank's sum, before the division"}
)
class ClampedGradients(Stack):
    def __init__(self, kit: Any) -> None:
        plain = nn.Linear(WIDTH, WIDTH)
        plain.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        super().__init__(plain, Block(kit))


class Round(torch.autograd.Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@user_model(features, classify, refused=NO_TOKENS)
class AutogradFunction(Stack):
    class Quantized(nn.Module):
        def __init__(self, kit: Any) -> None:
            super().__init__()
            self.linear = kit.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Round.apply(self.linear(x))
            return out

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Quantized(kit), self.Quantized(kit))


@user_model(features, classify, refused=NO_TOKENS)
class GeneratorInConstructor(Stack):
    def __init__(self, kit: Any) -> None:
        generator = torch.Generator().manual_seed(5)
        linears = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        for linear in reversed(linears):
            nn.init.normal_(linear.weight, std=0.2, generator=generator)
        super().__init__(*linears, Block(kit))


@user_model(features, classify, refused=NO_TOKENS)
class OwnInit(Stack):
    def __init__(self, kit: Any) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), Block(kit))
        nn.init.orthogonal_(self.blocks[0].weight, gain=0.5)
        self.head.weight.data.mul_(0.1)
        with torch.no_grad():
            self.head.bias.copy_(self.head.weight.sum(-1))


@user_model(features, classify, refused=NO_TOKENS)
class Checkpointed(Stack):
    class Cheap(nn.Module):
        def __init__(self, kit: Any) -> None:
            super().__init__()
            self.block = Block(kit)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.block, x, use_reentrant=False)  # type: ignore[no-untyped-call]
            return out

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Cheap(kit), self.Cheap(kit))


@user_model(features, classify, refused=NO_TOKENS)
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


@user_model(features, classify, refused=NO_TOKENS)
class NoDropout(Stack):
    """Rates of 0: random numbers are another table's."""

    def __init__(self, kit: Any) -> None:
        super().__init__(Block(kit), nn.Dropout(0.0), kit.Dropout(0.0), Block(kit))


@user_model(features, classify, refused=NO_TOKENS)
class ParameterContainers(Stack):
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shifts = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(2)])
            self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(WIDTH)), "b": nn.Parameter(torch.ones(()))})

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.shifts[0]) * self.scales["a"] * self.scales["b"] + self.shifts[1]

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Held(), Block(kit))


@user_model(features, classify, refused=NO_TOKENS)
class Einsum(Stack):
    class Product(nn.Module):
        def __init__(self, kit: Any) -> None:
            super().__init__()
            self.linear, self.core = kit.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH, 3) / WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bi,ijk,bj->bk", self.linear(x), self.core, x).repeat(1, 3)[:, :WIDTH]

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Product(kit), Block(kit))


@user_model(features, classify, refused=NO_TOKENS)
class ComplexNumbers(Stack):
    class Turned(nn.Module):
        def __init__(self, kit: Any) -> None:
            super().__init__()
            self.linear, self.angle = kit.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH // 2))

        def forward(self, x: Tensor) -> Tensor:
            pairs = torch.view_as_complex(self.linear(x).unflatten(-1, (-1, 2)).contiguous())
            turned = pairs * torch.polar(torch.ones_like(self.angle), self.angle)
            spectrum = torch.fft.rfft(torch.view_as_real(turned).flatten(-2))
            return torch.fft.irfft(spectrum * 0.5, n=WIDTH)

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Turned(kit), Block(kit))


@torch.jit.script
def scripted_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * x * x * x)))


@user_model(features, classify, refused=NO_TOKENS)
class ScriptedFunction(Stack):
    class Curved(nn.Module):
        def __init__(self, kit: Any) -> None:
            super().__init__()
            self.linear = kit.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = scripted_gelu(self.linear(x))
            return out

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Curved(kit), Block(kit))


@user_model(features, classify, refused=NO_TOKENS)
class FunctionalCall(Stack):
    """A module run with weights computed on the way (a hypernetwork)."""

    class Generated(nn.Module):
        def __init__(self, kit: Any) -> None:
            super().__init__()
            self.linear, self.size = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            weights = {name: value * self.size for name, value in self.linear.named_parameters()}
            out: Tensor = torch.func.functional_call(self.linear, weights, (x,))
            return out

    def __init__(self, kit: Any) -> None:
        super().__init__(self.Generated(kit), Block(kit))


def bags(step: int) -> Batch:
    return {"inputs": integers(step, 11, 8, 3), "labels": integers(step, CLASSES, 8)}


@user_model(bags, classify, refused=NO_TOKENS)
class EmbeddingBag(Stack):
    def __init__(self, kit: Any) -> None:
        super().__init__(nn.EmbeddingBag(11, WIDTH, mode="mean"), Block(kit))


def weighted(step: int) -> Batch:
    return {
        "inputs": draw(step, 8, WIDTH),
        "labels": integers(step, CLASSES, 8),
        "weights": integers(step, 3, 8).double() + 0.5,
    }


def weighted_loss(logits: Tensor, batch: Batch) -> Any:
    each = F.cross_entropy(logits, batch["labels"], reduction="none", label_smoothing=0.1)
    return (each * batch["weights"]).sum(), batch["weights"].sum()


@user_model(weighted, weighted_loss, refused=NO_TOKENS)
class WeightedLoss(Stack):
    def __init__(self, kit: Any) -> None:
        super().__init__(Block(kit), kit.RMSNorm(WIDTH))
