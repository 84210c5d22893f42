"""Models that compute with the sizes of tensors and of weights, and that use a weight past its layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from helpers.user_models.between_pairs import SPLIT, with_penalty
from helpers.user_models.cases import WIDTH, classify, tokens, user_model
from helpers.user_models.sequences import VOCABULARY, Language, PairAttention
from torch import Tensor, nn

from colossus.layers import PipelineBlock

HEADS = 4
#: under these plans a rank has a part of the weight of a layer
PARAMETER_ITSELF = dict.fromkeys((*SPLIT, "sequence 2 x 1d"), "the parameter itself")


class ComputesWithSizes(PairAttention):
    """Attention by hand, with what the sizes of split features say."""

    def scale(self, query: Tensor) -> float:
        return query.shape[-1] ** -0.5

    def opened(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], HEADS, x.shape[-1] // HEADS).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        query, key, value = (self.opened(part(x)) for part in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale(query))
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class NumberOfHeads(ComputesWithSizes):
    """Its scale is of the width, the size, the number of elements and the number of heads that tensors tell."""

    def scale(self, query: Tensor) -> float:
        batch, heads, length, width = query.shape
        return heads / (heads * width) + query.size(1) / query.numel() * batch * length

    def opened(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, x.shape[-1] // HEADS).transpose(1, 2) * x.size(2) ** -0.5


class HeadsFromTheRight(ComputesWithSizes):
    def opened(self, x: Tensor) -> Tensor:
        return x.reshape(x.size(0), x.size(1), -1, x.numel() // (len(x) * x.size(1) * HEADS)).permute(0, 2, 1, 3)


class SizesOfWeights(ComputesWithSizes):
    """Scale of initialization and of depth, as GPT-2 and muP write them: from the weight of a layer."""

    def scale(self, query: Tensor) -> float:
        rows, columns = self.query.weight.shape
        return rows**-0.5 + self.out.weight.numel() / (columns * self.value.weight.size(0) * len(self.key.weight))


class _Tied(Language):
    """The head is the table of the words, by hand."""

    def __init__(self, kit: Any) -> None:
        super().__init__(kit)
        del self.head

    def pipeline_blocks(self) -> list[Any]:
        *rest, _ = super().pipeline_blocks()
        return [*rest, PipelineBlock(self.top, "norm", "words")]


for attention in (ComputesWithSizes, NumberOfHeads, HeadsFromTheRight, SizesOfWeights):
    user_model(tokens, classify)(type(f"{attention.__name__}Model", (Language,), dict(attention=attention)))


@user_model(tokens, classify, refused=PARAMETER_ITSELF)
class TiedByLinear(_Tied):
    def top(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.words.weight)


@user_model(tokens, classify, refused=PARAMETER_ITSELF)
class TiedByTransposition(_Tied):
    def top(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x) @ self.words.weight.t()
        return out


@user_model(tokens, classify, refused=PARAMETER_ITSELF)
class TiedByProduct(_Tied):
    def top(self, x: Tensor) -> Tensor:
        return torch.matmul(self.norm(x), self.words.weight.mT)


@user_model(tokens, with_penalty, refused=PARAMETER_ITSELF)
class PenaltyOnWordsAndTokens(_Tied):
    """A sum over the squares of a weight, and a mean over what the blocks have made of all tokens."""

    def __init__(self, kit: Any) -> None:
        super().__init__(kit)
        self.out = nn.Parameter(torch.randn(WIDTH, VOCABULARY))

    def pipeline_blocks(self) -> list[Any]:
        *rest, _ = super().pipeline_blocks()
        return [*rest, PipelineBlock(self.top, "norm", "words", "out")]

    def top(self, x: Tensor) -> Any:
        return self.norm(x) @ self.out, self.words.weight.square().sum() + x.square().mean()
