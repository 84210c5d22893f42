"""The perturbation probe: a token changes nothing outside of its document and of what its mask lets see it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.fx.experimental.symbolic_shapes  # torch.autograd.grad imports it (seconds): once, before ranks are forked
from helpers.drawn import examples
from helpers.ranks import RankError, grid, run_ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.context.grid import RankGrid
from colossus.context.parallel_context import ParallelContext
from colossus.layers.model_parallel import model_parallel_of
from colossus.sequence_parallel import tiles
from colossus.sequence_parallel.mask import CAUSAL, FULL, Mask

TOKENS, HIDDEN, HEADS = 16, 8, 4
MASKS = [
    CAUSAL,
    FULL,
    Mask.window(4),
    Mask.window(2, 3),
    CAUSAL & Mask.chunk(8),
    Mask.chunk(4),
    Mask.prefix(6),
    Mask.prefix(7) & Mask.window(5, 4),
]


def seen_by(mask: Mask, documents: Tensor) -> Tensor:
    """[tokens, tokens], True where a query sees a key: position by position, as a user would say it."""
    sees = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    for query in range(TOKENS):
        for key in range(TOKENS):
            near = -mask.right <= query - key <= mask.left
            chunked = query // mask.chunk_size == key // mask.chunk_size
            prefixed = key <= query or key < mask.prefix_size
            sees[query, key] = near and chunked and prefixed and documents[query] == documents[key]
    return sees


class Stack(nn.Module):
    """Attentions one behind the other, whose masks may differ from layer to layer (gpt-oss, Gemma)."""

    def __init__(self, masks: Sequence[Mask], options: dict[str, Any]) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(layers.Attention(HIDDEN, HEADS, mask=mask, **options) for mask in masks)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        for attention in self.attentions:
            x = x + attention(x, documents=documents)
        return x


def probe(
    context: ParallelContext, masks: Sequence[Mask], documents: Tensor, token: int, options: dict[str, Any]
) -> None:
    """Change a token, and the gradient of an output: nothing else may change on any rank."""
    module = colossus.build(partial(Stack, masks, options), context, dtype=torch.float64)
    masked = ", ".join(map(str, masks))
    generator = torch.Generator().manual_seed(token)
    x = torch.randn(1, TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    dy = torch.randn(1, TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    sequence = model_parallel_of(context).sequence
    own = torch.arange(TOKENS)
    if sequence is not None:
        own = sequence.local_shard(own[None]).flatten()

    def run(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        part = x[:, own].clone().requires_grad_()
        with context:
            y = layers.to_whole(module(part, documents=documents[None, own]))
        return y.detach()[0], torch.autograd.grad(y, part, dy[:, own])[0][0]

    y, dx = run(x, dy)
    sees = torch.eye(TOKENS, dtype=torch.bool)
    for mask in masks:  # what a layer sees has seen what those before it let it see
        sees = (seen_by(mask, documents).double() @ sees.double()) > 0
    moved = x.clone()
    moved[0, token] += 1.0
    changed = (run(moved, dy)[0] != y).any(-1)
    assert torch.equal(changed, sees[own, token]), f"values, {masked}: token {token} reaches {own[changed].tolist()}"
    moved = dy.clone()
    moved[0, token] += 1.0
    changed = (run(x, moved)[1] != dx).any(-1)
    assert torch.equal(changed, sees[token, own]), f"gradients, {masked}: token {token} reaches {own[changed].tolist()}"


PLANS: dict[str, tuple[RankGrid, str]] = {
    "alone": (grid(), "ring"),
    "ring": (grid(sequence=2), "ring"),
    "ulysses": (grid(sequence=2), "ulysses"),
    "1d": (grid(tensor=2), "ring"),
    "ring x 1d": (grid(tensor=2, sequence=2), "ring"),
}
#: options of the attention beside its mask
OPTIONS: list[dict[str, Any]] = [{}, dict(sinks=True), dict(soft_cap=0.5, sinks=True), dict(rotary=True)]
#: as in gpt-oss
_YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8, truncate=False)
OPTIONS.append(dict(sinks=True, rotary=True, rotary_scaling=_YARN, num_kv_heads=2))


def run_probe(plan: str, *arguments: Any) -> None:
    ranks, mode = PLANS[plan]
    run_ranks(ranks.world_size, probe, *arguments, plan=ranks, sequence_mode=mode)


@settings(max_examples=examples(6), suppress_health_check=[HealthCheck.too_slow])
@given(
    plan=st.sampled_from(list(PLANS)),
    kinds=st.tuples(st.sampled_from(MASKS), st.sampled_from(MASKS)),
    next_layer=st.none() | st.sampled_from(MASKS),
    starts=st.sets(st.integers(1, TOKENS - 1), max_size=3),
    token=st.integers(0, TOKENS - 1),
    options=st.sampled_from(OPTIONS),
)
def test_a_token_changes_what_sees_it_and_nothing_else(
    plan: str, kinds: tuple[Mask, Mask], next_layer: Mask | None, starts: set[int], token: int, options: dict[str, Any]
) -> None:
    documents = torch.tensor([sum(start <= place for start in starts) for place in range(TOKENS)])
    masks = (kinds[0] & kinds[1],) if next_layer is None else (kinds[0] & kinds[1], next_layer)
    run_probe(plan, masks, documents, token, options)


def test_layers_of_gpt_oss() -> None:
    """A window, then all tokens before, with sinks: over a ring."""
    documents = torch.arange(TOKENS) // 11
    run_probe("ring", (CAUSAL & Mask.window(2), CAUSAL), documents, 4, OPTIONS[-1])


def _without_documents(context: ParallelContext, *arguments: Any) -> None:
    with patch.object(tiles, "_is_one_document", lambda *_: True):
        probe(context, *arguments)


def test_the_probe_sees_a_document_that_is_lost() -> None:
    documents = torch.arange(TOKENS) // 9
    with pytest.raises(RankError, match="values, causal: token 3 reaches"):
        run_ranks(2, _without_documents, (CAUSAL,), documents, 3, {}, plan=grid(sequence=2), sequence_mode="ring")
