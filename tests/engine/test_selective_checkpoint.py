"""Selective activation checkpointing beside none: the bytes that a block keeps, and the collectives that it repeats."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from helpers.long import but, long
from helpers.modes import BATCH, MODES, TOKENS, own
from helpers.ranks import run_ranks

import colossus
from colossus import layers
from colossus.comm import tensor_transport, uneven
from colossus.config import load_config
from colossus.context.grid import RankGrid
from colossus.context.parallel_context import ParallelContext
from colossus.planner.layout_profile import BlockProfile, profile_layout
from colossus.planner.trace import Product, Started

HIDDEN, TOKENS_OF_SAMPLE, SAMPLES = 64, 32, 16
SIZES = dict(num_layers=2, hidden_size=HIDDEN, num_heads=4, vocab_size=256, seq_len=TOKENS_OF_SAMPLE)
GPT = dict(type="GPT", **SIZES)
LLAMA = dict(type="Llama", **SIZES)
#: with experts so thin that the rows of their exchange are most of what is kept
MOE = dict(type="Llama", **SIZES, ffn_hidden_size=HIDDEN // 4, experts=dict(num=8, top_k=2))
TOKENS_SPLIT = dict(tensor=dict(size=4, sequence_sharded=True))

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one process": (1, {}, GPT),
    "1d": (4, dict(tensor=4), GPT),
    "1d, tokens split": (4, TOKENS_SPLIT, GPT),
    "1d, tokens split, swiglu": (4, TOKENS_SPLIT, LLAMA),
    "1d, tokens split, inputs kept": (4, dict(tensor=dict(**TOKENS_SPLIT["tensor"], gathered="keep")), GPT),
    "2d": (4, dict(tensor=dict(mode="2d", size=4)), GPT),
    "2d, weights of a microbatch": (4, dict(tensor=dict(mode="2d", size=4, weights="microbatch")), GPT),
    "2d, weights of a step": (4, dict(tensor=dict(mode="2d", size=4, weights="step")), GPT),
    "2.5d": (8, dict(tensor=dict(mode="2.5d", size=8, depth=2)), GPT),
    "3d": (8, dict(tensor=dict(mode="3d", size=8)), GPT),
    "ring": (2, dict(sequence=dict(size=2, mode="ring")), LLAMA),
    "ulysses": (2, dict(sequence=dict(size=2, mode="ulysses")), LLAMA),
    "experts": (1, {}, MOE),
    "experts over ranks": (4, dict(data=4, expert=4), MOE),
    "experts over ranks, tokens split": (8, dict(data=4, expert=4, tensor=dict(size=2, sequence_sharded=True)), MOE),
}
#: those that run by default
SOME = {"1d, tokens split, swiglu", "2d, weights of a step", "experts over ranks, tokens split"}


def block_of(case: str, kind: str, precision: str) -> BlockProfile:
    """Return the profile of a transformer block, run without values."""
    world, parallel, model = CASES[case]
    train = dict(global_batch_size=SAMPLES * parallel.get("data", 1), precision=precision, activation_checkpoint=kind)
    config = dict(parallel=parallel, model=model, data=dict(type="PythonStdlib"), train=dict(steps=1, **train))
    return profile_layout(load_config(config, nproc=world)).blocks[2]


def started(block: BlockProfile) -> list[tuple[str, str, float]]:
    """Return operation, axes and bytes of the collectives of its backward, those of recomputation included."""
    events = [event for event in (*block.backward.events, *block.backward.repeated) if isinstance(event, Started)]
    return sorted((event.operation, event.axes, event.input_bytes) for event in events)


@pytest.mark.parametrize("precision", ["bf16", *long("fp32")])
@pytest.mark.parametrize("case", but(CASES.keys() - SOME, CASES))
def test_selective_keeps_less_than_none_and_sends_the_same(case: str, precision: str) -> None:
    plain, selective, full = (block_of(case, kind, precision) for kind in ("none", "selective", "full"))
    assert full.saved < selective.saved < plain.saved
    assert started(selective) == started(plain)
    assert not any(isinstance(event, Product) for event in selective.backward.repeated)


def test_bytes_of_a_block_whose_tokens_are_split() -> None:
    """Its output; query, key and value; attention and the product behind it; the MLP's inner features."""
    selective = block_of("1d, tokens split", "selective", "fp32")
    log_sums = SIZES["num_heads"] / HIDDEN
    assert selective.saved == (1 + 3 + 1 + log_sums + 1 + 4) * selective.passed


# -- real ranks -------------------------------------------------------------------------------------------------


def with_functional_collectives_out_of_reach(context: ParallelContext) -> None:
    block: Any = colossus.build(
        lambda: layers.TransformerBlock(24, 12, None, 48, dropout=0.1, activation_checkpoint="selective"), context
    )
    x = own(context, torch.ones(BATCH, TOKENS, 24)).requires_grad_()
    with patch.object(tensor_transport, "_functional", None):
        layers.to_whole(block(layers.to_residual(x, block.parallel))).square().sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("mode", ["1d_sequence", "2d"])
def test_collectives_take_their_fastest_way(mode: str) -> None:
    MODES[mode].run(with_functional_collectives_out_of_reach)


def exchanges(context: ParallelContext, kind: str) -> int:
    """Return how many exchanges of tokens a forward and backward of experts have."""
    block: Any = colossus.build(
        lambda: layers.TransformerBlock(
            24, 4, experts=dict(ffn_size=12, num_experts=4, top_k=2), activation_checkpoint=kind
        ),
        context,
    )
    with patch.object(uneven, "all_to_all", Mock(wraps=uneven.all_to_all)) as exchange:
        block(torch.linspace(-1, 1, 3 * 5 * 24).view(3, 5, 24).requires_grad_()).square().sum().backward()
    return exchange.call_count


def test_tokens_of_experts_travel_once() -> None:
    sizes = {"pipeline": 1, "data": 2, "sequence": 1, "tensor": 1}
    grid = RankGrid(sizes, {name: (name,) for name in sizes} | {"expert": ("data",)})
    for kind, times in (("none", 4), ("selective", 4), ("full", 6)):
        assert run_ranks(2, exchanges, kind, plan=grid) == [times] * 2
