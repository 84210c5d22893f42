"""Every layer with inputs for it, and what it computes: output, gradients of inputs and parameters, as whole tensors.

The reference is the same layer in one process on the CPU in float64, which the suite holds equal to plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from helpers.modes import BATCH, own
from helpers.ranks import grid
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.checkpoint.state_dict import full_state_dict
from colossus.comm import collectives
from colossus.context.parallel_context import ParallelContext
from colossus.gradients.buckets import gradient_sum_axes
from colossus.layers.model_parallel import model_parallel_of

#: divide over every mode of `helpers.modes`; heads of 16 features are what flash attention takes
HIDDEN, HEADS, WIDE, TOKENS, VOCAB = 192, 12, 288, 10, 37

#: gaps that rounding makes, relative to the norm of what is compared; twice what a float of that type rounds off, times
#: the products that follow each other
ALLOWED: dict[torch.dtype, float] = {
    torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3,
}  # fmt: skip
_SHORT = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def integers(below: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


X = numbers(BATCH, TOKENS, HIDDEN)
IDS = integers(VOCAB, BATCH, TOKENS)
LABELS = integers(VOCAB, BATCH, TOKENS, seed=2)
LABELS[0, :4] = -100
DOCUMENTS = integers(3, BATCH, TOKENS, seed=3).sort(dim=1).values


@dataclass(frozen=True)
class LayerCase:
    """A layer, or a few in a row, and what it is called with.

    Attributes:
        make: the layer.
        inputs: global tensors, dim 0 the samples; floats get gradients.
        has_low: whether low precision is near the wide one. Of a largest value it is not: rounding decides which it is.
    """

    make: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    has_low: bool = True


class Between(nn.Module):
    """A layer in the layout that activations have between blocks."""

    def __init__(self, inner: Callable[[], nn.Module], **options: Any) -> None:
        super().__init__()
        self.inner, self.options = inner(), options

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        return self.inner(layers.to_residual(x), *more, **self.options)


class Pair(nn.Module):
    """Column, whatever works element by element, row; then heads and back."""

    def __init__(self) -> None:
        super().__init__()
        self.up = layers.Linear(HIDDEN, WIDE, split="column")
        self.down = layers.Linear(WIDE, HIDDEN, split="row", bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) * 2.0)


class Loss(nn.Module):
    """Head and loss: the sum over the samples of this rank."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.head, self.options = layers.LMHead(HIDDEN, VOCAB, bias=True), options

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return layers.cross_entropy(self.head(x), labels, **self.options)[0]


class Sampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.SampledSoftmax(HIDDEN, VOCAB, 9, sparse=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.inner(x, labels)[0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = layers.Embedding(VOCAB, HIDDEN)
        self.head = layers.LMHead(HIDDEN, VOCAB, tied_to=self.embedding)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return layers.cross_entropy(self.head(self.embedding(ids)), labels)[0]


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = layers.Embedding(VOCAB, HIDDEN), layers.PositionEmbedding(TOKENS, HIDDEN)

    def forward(self, ids: Tensor) -> Tensor:
        return self.positions(self.embedding(ids))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = layers.PatchEmbedding(3, HIDDEN, (2, 4)), layers.ClassToken(HIDDEN)
        self.head = layers.Classifier(HIDDEN, 12)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.token(self.patches(images))[:, 0])


class Documents(nn.Module):
    """A token looks at the tokens before it that are of its own document."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Attention(HIDDEN, HEADS)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        return self.inner(x, documents=documents)


class Checkpointed(nn.Module):
    """A block behind another whose activations are computed again."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.second = block(**options)(), layers.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return layers.to_whole(self.second(self.first(torch.tanh(x))))


def block(**options: Any) -> Callable[[], nn.Module]:
    return partial(layers.TransformerBlock, HIDDEN, HEADS, ffn_size=WIDE, **options)


def lora(split: str | None) -> nn.Module:
    return layers.LoRALinear(layers.Linear(HIDDEN, WIDE, split=split), rank=12, alpha=24.0)


CASES: dict[str, LayerCase] = {
    "Linear": LayerCase(partial(layers.Linear, HIDDEN, 36), (X,)),
    "Linear column, row": LayerCase(Pair, (X,)),
    "Linear column, row between blocks": LayerCase(partial(Between, Pair), (X,)),
    "Embedding": LayerCase(partial(layers.Embedding, VOCAB, HIDDEN, 2), (IDS,)),
    "Embedding, PositionEmbedding": LayerCase(Positions, (IDS,)),
    "EmbeddingBag sum": LayerCase(partial(layers.EmbeddingBag, VOCAB, HIDDEN, mode="sum"), (IDS,)),
    "EmbeddingBag mean": LayerCase(partial(layers.EmbeddingBag, VOCAB, HIDDEN, padding_idx=3), (IDS,)),
    "EmbeddingBag max": LayerCase(partial(layers.EmbeddingBag, VOCAB, HIDDEN, mode="max"), (IDS,), has_low=False),
    "LayerNorm": LayerCase(partial(Between, partial(layers.LayerNorm, HIDDEN)), (X,)),
    "RMSNorm": LayerCase(partial(Between, partial(layers.RMSNorm, HIDDEN)), (X,)),
    "MLP": LayerCase(partial(layers.MLP, HIDDEN, WIDE), (X,)),
    "GatedMLP": LayerCase(partial(layers.GatedMLP, HIDDEN, WIDE), (X,)),
    "Attention causal": LayerCase(partial(layers.Attention, HIDDEN, HEADS), (X,)),
    "Attention both ways": LayerCase(partial(layers.Attention, HIDDEN, HEADS, causal=False), (X,)),
    "Attention rotary, grouped heads": LayerCase(partial(layers.Attention, HIDDEN, HEADS, 6, rotary=True), (X,)),
    "Attention within documents": LayerCase(Documents, (X, DOCUMENTS)),
    "TransformerBlock": LayerCase(partial(Between, block()), (X,)),
    "TransformerBlock like Llama": LayerCase(
        partial(Between, block(norm="rmsnorm", mlp="swiglu", bias=False, rotary=True)), (X,)
    ),
    "TransformerBlock checkpointed, full": LayerCase(partial(Checkpointed, activation_checkpoint="full"), (X,)),
    "TransformerBlock checkpointed, selective": LayerCase(
        partial(Checkpointed, activation_checkpoint="selective"), (X,)
    ),
    "LoRALinear": LayerCase(partial(lora, None), (X,)),
    "LMHead, cross_entropy": LayerCase(Loss, (X, LABELS)),
    "LMHead, cross_entropy smoothed, z-loss": LayerCase(partial(Loss, label_smoothing=0.1, z_loss=0.02), (X, LABELS)),
    "Embedding tied to LMHead": LayerCase(Tied, (IDS, LABELS)),
    "SampledSoftmax": LayerCase(Sampled, (X, LABELS.clamp(min=0))),
    "PatchEmbedding, ClassToken, Classifier": LayerCase(Images, (numbers(BATCH, 3, 4, 8),)),
}  # fmt: skip


def computed(
    context: ParallelContext, case: LayerCase, dtype: torch.dtype, autocast: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Output and gradients of sum(layer(..) * weights), on the host in float64. Of what is split by samples this rank's
    share, of parameters the whole gradients.

    Args:
        autocast: the layer holds ``dtype``, and runs under ``torch.autocast`` of this one.
    """
    module = colossus.build(case.make, context, dtype=dtype)
    device = context.device
    inputs = [
        own(context, x).to(device, dtype).requires_grad_() if x.is_floating_point() else own(context, x).to(device)
        for x in case.inputs
    ]
    with context, torch.autocast(device.type, autocast) if autocast is not None else nullcontext():
        out = layers.to_whole(module(*inputs))
    if out.dim():
        weights = numbers(*(BATCH, *out.shape[1:]), seed=9)
        (out * own(context, weights).to(out)).sum().backward()
    else:  # a loss is a sum over samples
        out.backward()
        out = collectives.all_reduce(out.detach(), context.group(model_parallel_of(context).regions.whole.batch)).wait()
    for parameter in module.parameters():
        if parameter.grad is not None and (axes := gradient_sum_axes(parameter, context)):
            parameter.grad = collectives.all_reduce(parameter.grad.contiguous(), context.group(axes)).wait()
    found = {"output": out, **{f"gradient of input {i}": x.grad for i, x in enumerate(inputs) if x.grad is not None}}
    found |= {f"gradient of {n}": g for n, g in full_state_dict(module, context, gradients=True).items()}
    return {name: value.detach().to("cpu", torch.float64) for name, value in found.items()}


@cache
def reference(name: str) -> dict[str, Tensor]:
    """In one process on the CPU, in float64."""
    return computed(ParallelContext(grid()), CASES[name], torch.float64)


def largest_gap(
    context: ParallelContext, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
) -> tuple[float, str]:
    """The largest norm of a difference over the norm of what is wanted, and of what.

    Gradients that are nothing but rounding (of a key's bias, which softmax ignores) are measured against the largest.

    Raises:
        AssertionError: where names or shapes differ, or a number is not finite.
    """
    assert found.keys() == wanted.keys(), f"there is {sorted(found)}, not {sorted(wanted)}"
    least = 1e-2 * max(value.norm().item() for value in wanted.values())
    worst = 0.0, "nothing"
    for name, value in wanted.items():
        if name == "output" or name.startswith("gradient of input"):
            value = own(context, value) if value.dim() else value
        mine = found[name]
        assert mine.shape == value.shape, f"{name} has shape {tuple(mine.shape)}, not {tuple(value.shape)}"
        assert mine.isfinite().all(), f"{name} has {int((~mine.isfinite()).sum())} numbers that are not finite"
        gap = (mine - value).norm().item() / max(value.norm().item(), least)
        worst = max(worst, (gap, name))
    return worst


def check(
    context: ParallelContext, name: str, dtype: torch.dtype, autocast: torch.dtype | None = None
) -> dict[str, float]:
    """The gap of a layer under this context, as a figure.

    Raises:
        AssertionError: where it is larger than what rounding makes.
    """
    gap, what = largest_gap(context, computed(context, CASES[name], dtype, autocast), reference(name))
    low = autocast or dtype
    title = _SHORT[low] + (" autocast" if autocast is not None else "")
    assert gap <= ALLOWED[low], (
        f"{name}, {title}: {what} is off by {gap:.2g} of its norm, {ALLOWED[low]:.2g} is allowed"
    )
    return {title: gap}
