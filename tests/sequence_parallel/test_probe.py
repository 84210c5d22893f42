"""The perturbation probe: a token changes nothing outside of its document and of what its mask lets see it."""

from __future__ import annotations

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
from torch import Tensor

import colossus
from colossus import layers
from colossus.context.grid import RankGrid
from colossus.context.parallel_context import ParallelContext
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


def probe(context: ParallelContext, mask: Mask, documents: Tensor, token: int, options: dict[str, Any]) -> None:
    """Change a token, and the gradient of an output: nothing else may change on any rank."""
    module = colossus.build(
        partial(layers.Attention, HIDDEN, HEADS, mask=mask, **options), context, dtype=torch.float64
    )
    generator = torch.Generator().manual_seed(token)
    x = torch.randn(1, TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    dy = torch.randn(1, TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    sequence = module.parallel.sequence
    own = torch.arange(TOKENS)
    if sequence is not None:
        own = sequence.local_shard(own[None]).flatten()

    def run(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        part = x[:, own].clone().requires_grad_()
        with context:
            y = layers.to_whole(module(part, documents=documents[None, own]))
        return y.detach()[0], torch.autograd.grad(y, part, dy[:, own])[0][0]

    y, dx = run(x, dy)
    sees = seen_by(mask, documents)
    moved = x.clone()
    moved[0, token] += 1.0
    changed = (run(moved, dy)[0] != y).any(-1)
    assert torch.equal(changed, sees[own, token]), f"values, {mask}: token {token} reaches {own[changed].tolist()}"
    moved = dy.clone()
    moved[0, token] += 1.0
    changed = (run(x, moved)[1] != dx).any(-1)
    assert torch.equal(changed, sees[token, own]), f"gradients, {mask}: token {token} reaches {own[changed].tolist()}"


PLANS: dict[str, tuple[RankGrid, str]] = {
    "alone": (grid(), "ring"),
    "ring": (grid(sequence=2), "ring"),
    "ulysses": (grid(sequence=2), "ulysses"),
    "1d": (grid(tensor=2), "ring"),
    "ring x 1d": (grid(tensor=2, sequence=2), "ring"),
}
#: options of the attention beside its mask
OPTIONS: list[dict[str, Any]] = [{}, dict(sinks=True), dict(soft_cap=0.5, sinks=True), dict(rotary=True)]


def run_probe(plan: str, *arguments: Any) -> None:
    ranks, mode = PLANS[plan]
    run_ranks(ranks.world_size, probe, *arguments, plan=ranks, sequence_mode=mode)


@settings(max_examples=examples(6), suppress_health_check=[HealthCheck.too_slow])
@given(
    plan=st.sampled_from(list(PLANS)),
    kinds=st.tuples(st.sampled_from(MASKS), st.sampled_from(MASKS)),
    starts=st.sets(st.integers(1, TOKENS - 1), max_size=3),
    token=st.integers(0, TOKENS - 1),
    options=st.sampled_from(OPTIONS),
)
def test_a_token_changes_what_sees_it_and_nothing_else(
    plan: str, kinds: tuple[Mask, Mask], starts: set[int], token: int, options: dict[str, Any]
) -> None:
    documents = torch.tensor([sum(start <= place for start in starts) for place in range(TOKENS)])
    run_probe(plan, kinds[0] & kinds[1], documents, token, options)


def _without_documents(context: ParallelContext, *arguments: Any) -> None:
    with patch.object(tiles, "_is_one_document", lambda *_: True):
        probe(context, *arguments)


def test_the_probe_sees_a_document_that_is_lost() -> None:
    documents = torch.arange(TOKENS) // 9
    with pytest.raises(RankError, match="values, causal: token 3 reaches"):
        run_ranks(2, _without_documents, CAUSAL, documents, 3, {}, plan=grid(sequence=2), sequence_mode="ring")
