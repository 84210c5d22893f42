"""Models of sequences."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from helpers.user_models.cases import (
    CLASSES,
    TOKENS,
    WIDTH,
    Batch,
    classify,
    integers,
    tokens,
    user_model,
    vectors,
)
from helpers.user_models.features import NO_CHAIN, Block
from torch import Tensor, nn

from colossus.layers import PipelineBlock

VOCABULARY = 11


class OwnAttention(nn.Module):
    """torch's linears and scaled_dot_product_attention."""

    def __init__(self, kit: Any, heads: int = 4) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), heads

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class PairAttention(nn.Module):
    """Megatron's: heads split over the ranks between a column and a row linear."""

    def __init__(self, kit: Any, heads: int = 4) -> None:
        super().__init__()
        for name in ("query", "key", "value"):
            setattr(self, name, kit.Linear(WIDTH, WIDTH, split="column"))
        self.out, self.heads, self.kit = kit.Linear(WIDTH, WIDTH, split="row"), heads, kit

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        query = self.kit.split_heads(self.query(x), self.heads)
        key, value = (self.kit.split_heads(part(memory), self.heads) for part in (self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=memory is x)
        out: Tensor = self.out(self.kit.merge_heads(mixed))
        return out


class Language(nn.Module):
    """Embedding, positions, blocks of an attention and an MLP, head."""

    attention: Any = OwnAttention

    def __init__(self, kit: Any) -> None:
        super().__init__()
        self.words, self.places = kit.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(1, TOKENS, WIDTH))
        self.mixers = nn.ModuleList(self.attention(kit) for _ in range(2))
        self.mlps = nn.ModuleList(Block(kit) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), kit.Linear(WIDTH, VOCABULARY, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        out: Tensor = self.words(ids) + self.places[:, : ids.shape[1]]
        return out

    def block(self, index: int) -> Any:
        return lambda x: self.mlps[index](x + self.mixers[index](x))

    def top(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(x))
        return out

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for index in range(2):
            x = self.block(index)(x)
        return self.top(x)

    def pipeline_blocks(self) -> list[Any]:
        inner = [PipelineBlock(self.block(i), f"mixers.{i}", f"mlps.{i}") for i in range(2)]
        return [PipelineBlock(self.embed, "words", "places"), *inner, PipelineBlock(self.top, "norm", "head")]


@user_model(tokens, classify)
class TransformerWithOwnAttention(Language):
    pass


@user_model(tokens, classify)
class TransformerOfPairs(Language):
    attention = PairAttention


@user_model(vectors, classify)
class PositionWise(nn.Sequential):
    """Nothing mixes tokens: right under every plan."""

    def __init__(self, kit: Any) -> None:
        super().__init__(
            nn.Linear(WIDTH, WIDTH), nn.GELU(), Block(kit), kit.RMSNorm(WIDTH), Block(kit), nn.Linear(WIDTH, CLASSES)
        )


def padded(step: int) -> Batch:
    lengths = integers(step, 5, 8) + 4
    keep = torch.arange(TOKENS) < lengths[:, None]
    given = {"ids": integers(step, VOCABULARY, 8, TOKENS), "keep": keep}
    return {"inputs": given, "labels": integers(step, VOCABULARY, 8, TOKENS).masked_fill(~keep, -100)}


def ignoring(logits: Tensor, batch: Batch) -> Any:
    labels = batch["labels"]
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    return total, (labels != -100).sum()


@user_model(padded, ignoring, refused=NO_CHAIN)
class MaskedAttention(nn.Module):
    """A padding mask, and labels that do not count."""

    def __init__(self, kit: Any) -> None:
        super().__init__()
        self.words, self.attention = kit.Embedding(VOCABULARY, WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.block, self.head = Block(kit), kit.Linear(WIDTH, VOCABULARY)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        x = self.words(given["ids"])
        mixed, _ = self.attention(x, x, x, key_padding_mask=~given["keep"], need_weights=False)
        out: Tensor = self.head(self.block(x + mixed))
        return out
