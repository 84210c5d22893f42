"""Every layer, small: what makes it, and inputs for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from helpers.modes import BATCH, TOKENS
from torch import Tensor, nn

from colossus import layers

HIDDEN, HEADS, WIDE, WORDS = 24, 6, 36, 41


class Pair(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up = layers.Linear(HIDDEN, WIDE, bias, split="column")
        self.down = layers.Linear(WIDE, HIDDEN, bias, split="row")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Between(nn.Module):
    """A layer where activations are split as they are between blocks."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        return layers.to_whole(self.layer(layers.to_residual(x), *more))


class Sampled(nn.Module):
    """A sampled softmax of which some tokens do not count."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.loss = layers.SampledSoftmax(HIDDEN, WORDS, 7, **options)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss, count = self.loss(x, labels.masked_fill(labels < 9, -100))
        return loss / count


class Head(nn.Module):
    """A head whose logits stay split, and its loss."""

    def __init__(self, loss: Callable[..., tuple[Tensor, Tensor]], words: int = WORDS) -> None:
        super().__init__()
        self.head, self.loss = layers.LMHead(HIDDEN, words), loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(x)
        hits, seen = layers.accuracy(logits, labels)
        loss, count = self.loss(logits, labels)
        return loss / count + 0.0 * hits / seen


class Adapted(nn.Module):
    """Linears between which features are split, and one alone, with LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.alone = layers.LoRALinear(layers.Linear(HIDDEN, HIDDEN), 12, 3.0)
        self.up = layers.LoRALinear(layers.Linear(HIDDEN, WIDE, split="column"), 12)
        self.down = layers.LoRALinear(layers.Linear(WIDE, HIDDEN, split="row"), 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.alone(x))))


def smoothed(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return layers.cross_entropy(logits, labels, label_smoothing=0.1, z_loss=0.01)


def hidden(device: str) -> Tensor:
    return torch.randn(BATCH, TOKENS, HIDDEN, device=device)


def ids(device: str, *shape: int, words: int = WORDS) -> Tensor:
    return torch.randint(0, words, shape or (BATCH, TOKENS), device=device)


def block(**options: Any) -> nn.Module:
    return Between(layers.TransformerBlock(HIDDEN, HEADS, None, WIDE, **options))


def attention(**options: Any) -> nn.Module:
    return layers.Attention(HIDDEN, HEADS, 1, **options)


Inputs = tuple[Any, ...]
#: name -> the layer, its inputs (with the whole batch)
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[str], Inputs]]] = {
    "linear": (lambda: layers.Linear(HIDDEN, 7), lambda on: (hidden(on),)),
    "pair": (Pair, lambda on: (hidden(on),)),
    "pair, no bias": (lambda: Pair(bias=False), lambda on: (hidden(on),)),
    "layer norm": (lambda: Between(layers.LayerNorm(HIDDEN)), lambda on: (hidden(on),)),
    "rms norm": (lambda: Between(layers.RMSNorm(HIDDEN)), lambda on: (hidden(on),)),
    "batch norm": (lambda: layers.BatchNorm1d(TOKENS), lambda on: (hidden(on),)),
    "dropout": (lambda: Between(layers.Dropout(0.3)), lambda on: (hidden(on),)),
    "mlp": (lambda: layers.MLP(HIDDEN, WIDE), lambda on: (hidden(on),)),
    "gated mlp": (lambda: layers.GatedMLP(HIDDEN, WIDE), lambda on: (hidden(on),)),
    "embedding": (lambda: layers.Embedding(WORDS, HIDDEN), lambda on: (ids(on),)),
    "embedding, padding": (lambda: layers.Embedding(WORDS, HIDDEN, -1), lambda on: (ids(on),)),
    "positions": (lambda: Between(layers.PositionEmbedding(TOKENS + 1, HIDDEN)), lambda on: (hidden(on),)),
    "bag of sums": (lambda: layers.EmbeddingBag(WORDS, HIDDEN, mode="sum"), lambda on: (ids(on),)),
    "bag of means, padding": (lambda: layers.EmbeddingBag(WORDS, HIDDEN, padding_idx=3), lambda on: (ids(on),)),
    "bag of largest": (lambda: layers.EmbeddingBag(WORDS, HIDDEN, mode="max"), lambda on: (ids(on),)),
    "weighted bag": (
        lambda: layers.EmbeddingBag(WORDS, HIDDEN, mode="sum", padding_idx=3),
        lambda on: (ids(on), None, torch.randn(BATCH, TOKENS, device=on)),
    ),
    "patches": (lambda: layers.PatchEmbedding(3, HIDDEN, (2, 4)), lambda on: (torch.randn(BATCH, 3, 4, 8, device=on),)),
    "attention": (attention, lambda on: (hidden(on),)),
    "attention, dropout": (lambda: attention(dropout=0.2), lambda on: (hidden(on),)),
    "attention, mask": (
        attention,
        lambda on: (hidden(on), torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool, device=on)),
    ),
    "attention, documents": (attention, lambda on: (hidden(on), None, ids(on, words=2))),
    "attention, rotary": (lambda: attention(rotary=True, mask=layers.Mask.full()), lambda on: (hidden(on),)),
    "attention, scaled rotary": (
        lambda: attention(rotary=True, rotary_scaling=dict(factor=8.0)),
        lambda on: (hidden(on),),
    ),
    "block": (lambda: block(dropout=0.1, mlp="swiglu", norm="rmsnorm"), lambda on: (hidden(on),)),
    "lora": (Adapted, lambda on: (hidden(on),)),
    "vocabulary loss": (lambda: Head(layers.cross_entropy), lambda on: (hidden(on), ids(on))),
    "smoothed loss": (lambda: Head(smoothed, 13), lambda on: (hidden(on), ids(on, words=13))),
    "sampled loss": (lambda: Sampled(sparse=False), lambda on: (hidden(on), ids(on))),
    "class token": (lambda: layers.ClassToken(HIDDEN), lambda on: (hidden(on),)),
    "classifier": (lambda: layers.Classifier(HIDDEN, 12), lambda on: (hidden(on),)),
}
