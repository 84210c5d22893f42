"""Parameters and operations of the models, counted on the meta device; the sizes that nobody gives."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.sizes import count_parameters
from hypothesis import given, settings
from hypothesis import strategies as st

from colossus.config import load_config
from colossus.construct.build_model import build
from colossus.context.grid import build_grid
from colossus.context.parallel_context import ParallelContext, one_rank
from colossus.models.gpt import GPT
from colossus.models.vit import ViT
from colossus.monitor.mfu import flops_per_token

SEVEN = dict(num_layers=32, hidden_size=4096, num_heads=32, ffn_hidden_size=11008, vocab_size=32000, seq_len=4096)
EIGHT = dict(SEVEN, num_kv_heads=8, ffn_hidden_size=14336, vocab_size=128256, seq_len=131072)
BLOCK = 2 * 16 + 4 * (64 + 8) + (8 * 32 + 32) + (32 * 8 + 8)
SMALL: dict[str, Any] = dict(type="GPT", num_layers=2, hidden_size=8, num_heads=2, vocab_size=10, seq_len=6)
COUNTED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama 2 7B": (dict(type="Llama", **SEVEN), 6_738_415_616),
    "Llama 3 8B": (dict(type="Llama", **EIGHT), 8_030_261_248),
    "Qwen3 8B": (
        dict(type="Llama", num_layers=36, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, qk_norm=True,
             ffn_hidden_size=12288, vocab_size=151936),
        8_190_735_360,
    ),
    "Mixtral 8x7B": (
        dict(type="Llama", **SEVEN | dict(num_kv_heads=8, ffn_hidden_size=14336), experts=dict(num=8)), 46_702_792_704
    ),
    "Qwen3 30B-A3B": (
        dict(type="Llama", num_layers=48, hidden_size=2048, num_heads=32, num_kv_heads=4, head_dim=128, qk_norm=True,
             vocab_size=151936, experts=dict(num=128, top_k=8, ffn_size=768)),
        30_532_122_624,
    ),
    "ViT-B/16": (dict(type="ViT", num_layers=12, hidden_size=768, num_heads=12), 86_567_656),
    "ViT-H/14": (dict(type="ViT", num_layers=32, hidden_size=1280, num_heads=16, patch_size=14), 632_045_800),
    "GPT": (SMALL, 10 * 8 + 6 * 8 + 2 * BLOCK + 16),
    "heads of their own size": (
        dict(type="Llama", hidden_size=30, num_heads=4, num_kv_heads=2, head_dim=6, num_layers=1, vocab_size=10,
             ffn_hidden_size=40),
        2 * 10 * 30 + 3 * 30 + 30 * (4 + 2 + 2) * 6 + 4 * 6 * 30 + 3 * 30 * 40,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_are_those_published_and_those_by_hand(name: str) -> None:
    model, wanted = COUNTED[name]
    assert count_parameters(model) == wanted


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([1, 2, 4]), st.sampled_from(["gelu", "swiglu"]), st.booleans(), st.sampled_from([1, 2, 4, 8]))
def test_ranks_store_the_model_once_but_for_what_is_replicated(ranks: int, mlp: str, bias: bool, kv_heads: int) -> None:
    sizes = dict(hidden_size=64, num_heads=8, num_kv_heads=kv_heads, mlp=mlp, bias=bias, vocab_size=254)
    norms = (2 * 4 + 1) * 64 * (2 if bias else 1)
    replicated = norms + 128 * 64 + (2 * 4 * 64 if bias else 0)
    parallel = load_config(dict(parallel=dict(tensor=ranks))).parallel
    context = ParallelContext(build_grid(parallel), connect=False)
    held = sum(each.numel() for each in build(lambda: GPT(**sizes), context, materialize=False).parameters())
    whole, padding = count_parameters(dict(type="GPT", **sizes)), (-254 % ranks) * 64
    copies = ranks - 1 if kv_heads < ranks else 0  # of key/value heads that are fewer than the ranks
    copied = copies * 2 * 4 * 8 * kv_heads * (64 + bias)
    assert (held - replicated) * ranks == whole - replicated + padding + copied


#: options of a GPT -> whether its head has a weight of its own
DECODERS: dict[str, dict[str, Any]] = {
    "gelu, layernorm, tied": dict(),
    "grouped queries, rotary": dict(num_kv_heads=2, positions="rotary"),
    "untied, odd sizes": dict(mlp="swiglu", ffn_hidden_size=37, vocab_size=29, tie_embeddings=False),
}


@pytest.mark.parametrize("name", DECODERS)
def test_operations_are_6_for_each_weight_and_12_for_each_score(name: str) -> None:
    """The formula of PaLM (2204.02311, appendix B): 6 N + 12 L H Q T of a token, causal attention in full."""
    sizes: dict[str, Any] = dict(num_layers=2, hidden_size=32, num_heads=4, vocab_size=40, seq_len=12) | DECODERS[name]
    model = build(lambda: GPT(**sizes), one_rank(), materialize=False)
    o = model.options
    weights = sum(each.numel() for each in model.blocks.parameters() if each.dim() == 2)
    weights += o.hidden_size * o.vocab_size
    attention = 12 * o.num_layers * o.num_heads * o.head_dim * o.seq_len
    assert flops_per_token(dict(type="GPT", **sizes)) == 6 * weights + attention


def test_operations_are_those_of_the_experts_that_a_token_goes_through() -> None:
    sizes: dict[str, Any] = dict(
        type="Llama", num_layers=3, hidden_size=32, num_heads=4, ffn_hidden_size=36, seq_len=12
    )
    dense, experts = flops_per_token(sizes), dict(num=7, top_k=2, ffn_size=10, shared=8, every=2)
    assert dense is not None
    in_place_of_one_mlp = 6 * 3 * 32 * (2 * 10 + 8 - 36) + 6 * 32 * 7
    assert flops_per_token(sizes | dict(experts=experts)) == dense + in_place_of_one_mlp


REFUSED_EXPERTS = [
    (dict(num=3, top_k=4), {}, "model.experts: .*top_k = 4 experts of a token, but num = 3 of a layer"),
    (dict(num=3), dict(data=2, expert=2), "model.experts.num = 3 is not a multiple of parallel.expert.size = 2"),
    (dict(number=3), {}, "model.experts"),
]


@pytest.mark.parametrize(("experts", "parallel", "words"), REFUSED_EXPERTS)
def test_experts_that_are_refused(experts: dict[str, Any], parallel: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_config(dict(model=dict(type="Llama", experts=experts), parallel=parallel))


@pytest.mark.parametrize("more", [dict(), dict(pool="mean", mlp="swiglu", num_kv_heads=3, head_dim=5)], ids=str)
def test_operations_of_an_image(more: dict[str, Any]) -> None:
    """Its patches get no dgrad; its head meets one token."""
    sizes: dict[str, Any] = dict(
        num_layers=2, hidden_size=24, num_heads=12, image_size=(8, 6), patch_size=(2, 3), num_classes=5, **more
    )
    model = build(lambda: ViT(**sizes), one_rank(), materialize=False)
    o = model.options
    weights = sum(each.numel() for each in model.blocks.parameters() if each.dim() == 2)
    attention = 12 * o.num_layers * o.num_heads * o.head_dim * o.num_tokens**2
    ends = 4 * 8 * (3 * 2 * 3) * 24 + 6 * 24 * 5
    assert flops_per_token(dict(type="ViT", **sizes)) == 6 * weights * o.num_tokens + attention + ends


REFUSED = [
    (dict(head_dim=7), "model.head_dim = 7 is not a multiple of 2, since rotary positions rotate pairs"),
    (dict(hidden_size=30, num_heads=4), "model.hidden_size = 30 is not a multiple of 2 x model.num_heads = 8 "),
    (dict(rotary_scaling=dict(factor=2.0, low_freq_factor=4.0)), "low_freq_factor = 4.0 is not below high_freq_factor"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_rotary_positions_that_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_config(dict(model=dict(type="GPT", positions="rotary") | options))
