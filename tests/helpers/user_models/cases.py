"""What a user model of the table is: how it is made with our layers or torch's, its batches, its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossus import layers

BATCH, TOKENS, WIDTH, CLASSES = 8, 8, 8, 5


class Kit:
    """The layers that a model is made of: ours."""

    Linear, Embedding, LayerNorm, RMSNorm, Dropout = (
        layers.Linear,
        layers.Embedding,
        layers.LayerNorm,
        layers.RMSNorm,
        layers.Dropout,
    )
    BatchNorm1d = layers.BatchNorm1d
    split_heads, merge_heads = staticmethod(layers.split_heads), staticmethod(layers.merge_heads)
    to_whole = staticmethod(layers.to_whole)
    MLP = layers.MLP


class _PlainLinear(nn.Linear):
    def __init__(self, *sizes: Any, split: str | None = None, **options: Any) -> None:
        super().__init__(*sizes, **options)


class _PlainMLP(nn.Module):
    def __init__(self, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden_size, ffn_size), nn.Linear(ffn_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class PlainKit:
    """The same of torch: the oracle."""

    Linear, Embedding, LayerNorm, RMSNorm, Dropout = _PlainLinear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Dropout
    BatchNorm1d, MLP = nn.BatchNorm1d, _PlainMLP

    @staticmethod
    def split_heads(x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(-3, -2)

    @staticmethod
    def merge_heads(x: Tensor) -> Tensor:
        return x.transpose(-3, -2).flatten(-2)

    @staticmethod
    def to_whole(x: Tensor) -> Tensor:
        return x


Batch = dict[str, Any]
Loss = Callable[[Any, Batch], tuple[Tensor, int]]


@dataclass(frozen=True)
class UserModel:
    """One row of the table.

    Attributes:
        make: of a kit.
        batch: number of the step -> the global batch.
        refused: plan, or the beginning of its name -> words that its refusal contains; the longest that fits counts.
            Under all other plans the run equals plain torch.
        differs: plan, or the beginning of its name -> why its numbers are others by design, as the documents say.
        steps: for which it is trained.
        around: makes a context for its steps, here and in plain torch.
        has_batch_norm: its numbers are those of plain torch with as many microbatches.
    """

    name: str
    make: Callable[[Any], nn.Module]
    batch: Callable[[int], Batch]
    loss: Loss
    refused: Mapping[str, str] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)
    steps: int = 2
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    has_batch_norm: bool = False

    def refusal_under(self, plan: str) -> str | None:
        return _of_longest(self.refused, plan)

    def difference_under(self, plan: str) -> str | None:
        return _of_longest(self.differs, plan)


def _of_longest(said: Mapping[str, str], plan: str) -> str | None:
    fitting = [start for start in said if plan.startswith(start)]
    return said[max(fitting, key=len)] if fitting else None


MODELS: dict[str, UserModel] = {}


def user_model(
    batch: Callable[[int], Batch],
    loss: Loss,
    *,
    refused: Mapping[str, str] | None = None,
    differs: Mapping[str, str] | None = None,
) -> Callable[[type], type]:
    """Register a module class whose constructor takes a kit."""

    def register(made: type) -> type:
        name = "".join("_" + c.lower() if c.isupper() else c for c in made.__name__).lstrip("_")
        MODELS[name] = UserModel(name, made, batch, loss, refused or {}, differs or {})
        return made

    return register


# -- batches ----------------------------------------------------------------------------------------------------


def draw(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 + step), dtype=torch.float64)


def integers(step: int, high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(200 + step))


def features(step: int) -> Batch:
    return {"inputs": draw(step, BATCH, WIDTH), "labels": integers(step, CLASSES, BATCH)}


def vectors(step: int) -> Batch:
    """Sequences of vectors, and a class for each token."""
    return {"inputs": draw(step, BATCH, TOKENS, WIDTH), "labels": integers(step, CLASSES, BATCH, TOKENS)}


def tokens(step: int) -> Batch:
    return {"inputs": integers(step, 11, BATCH, TOKENS), "labels": integers(step + 1, 11, BATCH, TOKENS)}


def pictures(step: int) -> Batch:
    return {"inputs": draw(step, BATCH, 3, 8, 8), "labels": integers(step, CLASSES, BATCH)}


# -- losses -----------------------------------------------------------------------------------------------------


def classify(logits: Tensor, batch: Batch) -> tuple[Tensor, int]:
    labels = batch["labels"]
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    return total, labels.numel()


def squared(y: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return y.square().sum(), y.shape[0]
