"""Llama and ViT train alike under every plan, and as plain torch does."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from helpers.laws import assert_parity
from helpers.long import long
from helpers.ranks import grid, run_ranks
from helpers.training import (
    Trace,
    assert_is_plain_torch,
    assert_same_run,
    config_of,
    run_cases,
    run_plan,
    scheduled,
)
from helpers.twins import PlainLlama, PlainViT
from torch import nn

from colossus.context.parallel_context import ParallelContext
from colossus.layers.model_parallel import model_parallel_of
from colossus.models.multi_token import with_next_tokens

STEPS, LONG = 3, 20

SCALING = dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=96, rope_type="llama3"
)
LLAMA: dict[str, Any] = dict(
    type="Llama", num_layers=2, hidden_size=24, num_heads=12, num_kv_heads=1, head_dim=6, ffn_hidden_size=36,
    vocab_size=53, seq_len=16, rotary_base=500.0, rotary_scaling=SCALING,
)  # fmt: skip
#: 10 tokens, 9 of them patches: more than one rank would have without padding
VIT: dict[str, Any] = dict(
    type="ViT", num_layers=2, hidden_size=24, num_heads=12, image_size=(6, 9), patch_size=(2, 3), in_channels=2,
    num_classes=7, norm_eps=1e-12,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama tied": {**LLAMA, "tie_embeddings": True, "num_kv_heads": 2, "head_dim": None, "rotary_scaling": None},
    "llama experts": {**LLAMA, "experts": dict(num=4, top_k=2, ffn_size=12, shared=24, every=2)},
    "llama qk_norm": {**LLAMA, "qk_norm": True, "num_kv_heads": 2},
    "llama windows": {**LLAMA, "window": 3, "attention_pattern": ["local", "global"]},
    "llama mtp": {**LLAMA, "mtp_weight": 0.3, "tie_embeddings": True},
    "llama latent": {
        **LLAMA,
        "num_kv_heads": None,
        "head_dim": None,
        "rotary_scaling": None,
        "latent": dict(kv_rank=12, q_rank=18, nope_dim=4, rope_dim=6, value_dim=5),
    },
    "llama chunks": {**LLAMA, "chunk": 5, "window": 4, "rotary_fraction": 0.7, "norm_place": "after"},
    "like gemma": {
        **LLAMA,
        "num_kv_heads": 2,
        "qk_norm": True,
        "norm": "zero_centered_rmsnorm",
        "norm_place": "both",
        "mlp": "geglu_tanh",
        "window": 5,
        "attention_pattern": ["local", "global"],
        "rotary_base_local": 100.0,
        "rotary_scaling": dict(factor=4.0, rope_type="linear"),
        "attention_scale": 0.6,
        "soft_cap": 0.5,
        "embedding_scale": 4.9,
        "logit_cap": 0.8,
        "tie_embeddings": True,
    },
    "like gpt-oss": {
        **LLAMA,
        "window": 3,
        "attention_pattern": ["local", "global"],
        "sinks": True,
        "bias": True,
        "rotary_scaling": dict(factor=8.0, original_max_position_embeddings=64, rope_type="yarn", truncate=False),
    },
    "like qwen3-next": {
        **LLAMA,
        "qk_norm": True,
        "attention_pattern": ["linear", "global"],
        "linear": dict(num_heads=24, num_key_heads=12, key_dim=4, value_dim=3),
    },
    "vit": VIT,
    "vit mean": dict(
        VIT, pool="mean", label_smoothing=0.1, mlp="swiglu", ffn_hidden_size=36, norm="rmsnorm", bias=False
    ),
}
TWINS: dict[str, type[nn.Module]] = {"Llama": PlainLlama, "ViT": PlainViT}

Plan = tuple[int, dict[str, Any], dict[str, Any]]


#: name -> ranks, parallel, the rest of the config
PLANS: dict[str, Plan] = {
    "1d sharded 2": (2, dict(tensor=dict(size=2, sequence_sharded=True)), {}),
    "1f1b": (2, dict(pipeline=2), scheduled("1f1b")),
    "1d 4": (4, dict(tensor=4), {}),
    "1d sharded 4": (4, dict(tensor=dict(size=4, sequence_sharded=True)), {}),
    "data 2 x 1d sharded 2": (4, dict(data=2, tensor=dict(size=2, sequence_sharded=True)), scheduled("1f1b", 2)),
    "2d": (4, dict(tensor=dict(mode="2d", size=4)), {}),
    "3d 2x1x2": (4, dict(tensor=dict(mode="3d", shape=(2, 1, 2))), {}),
    "1f1b of all blocks": (4, dict(pipeline=4), scheduled("1f1b", 6)),
    "interleaved": (4, dict(pipeline=2, tensor=2), scheduled("interleaved", 2)),
    "zb-h1": (4, dict(pipeline=2, tensor=dict(size=2, sequence_sharded=True)), scheduled("zb-h1")),
    "zb-v": (4, dict(pipeline=2, tensor=dict(mode="2.5d", size=2, depth=2)), scheduled("zb-v", 2)),
    "pipeline x sharded": (4, dict(pipeline=2, tensor=dict(size=2, sequence_sharded=True)), scheduled("1f1b")),
    "zero 2": (4, dict(data=2, tensor=2, zero=2), {}),
    "zero 3": (4, dict(data=2, pipeline=2, zero=3), scheduled("1f1b", 2)),
    "experts 2 x 1d": (4, dict(data=2, tensor=2, expert=2), {}),
    "2d 2x3": (6, dict(tensor=dict(mode="2d", shape=(2, 3))), {}),
    "2.5d": (8, dict(tensor=dict(mode="2.5d", size=8, depth=2)), {}),
    "3d": (8, dict(tensor=dict(mode="3d", size=8)), {}),
    "pipeline x 2d": (8, dict(pipeline=2, tensor=dict(mode="2d", size=4)), scheduled("zb-v", 2)),
    "pipeline x data x 1d": (8, dict(pipeline=2, data=2, tensor=2), scheduled("1f1b", 2)),
}  # fmt: skip
#: divides over what splits a batch, and over the microbatches
BATCH = 24


def settings(model: str, plan: Plan, precision: str, steps: int, **more: Any) -> dict[str, Any]:
    _, parallel, rest = plan
    train = dict(global_batch_size=BATCH)
    return config_of(parallel, steps, precision, model={**MODELS[model], **more}, train=train, **rest)


@cache
def alone(model: str, precision: str, steps: int, **more: Any) -> Trace:
    return run_plan(1, settings(model, (1, {}, {}), precision, steps, **more), steps)[0]


def compare(cases: dict[tuple[str, str], Plan], precision: str, steps: int, **more: Any) -> None:
    """Runs of (model, plan), of plans with as many ranks, beside one process."""
    (world,) = {world for world, _, _ in cases.values()}
    configs = {
        f"{model}, {plan}": settings(model, case, precision, steps, **more) for (model, plan), case in cases.items()
    }
    found = run_cases(world, configs, steps)
    for (model, _), (name, traces) in zip(cases, found.items(), strict=True):
        reference = alone(model, precision, steps, **more)
        assert_parity(traces, reference, precision, name)


#: what runs by default: the plans in which these models differ from GPT most
FEW: dict[str, tuple[tuple[str, str], ...]] = {
    "2 ranks": (("vit", "1d sharded 2"), ("vit mean", "1d sharded 2")),
    "4 ranks": (
        ("vit", "2d"), ("vit mean", "3d 2x1x2"), ("vit", "zb-v"), ("llama tied", "data 2 x 1d sharded 2"),
        ("llama qk_norm", "2d"), ("llama latent", "zb-h1"), ("llama mtp", "pipeline x sharded"),
        ("llama", "3d 2x1x2"), ("llama experts", "experts 2 x 1d"),
        ("like gemma", "2d"), ("like gpt-oss", "1d sharded 4"),
        ("like qwen3-next", "zb-h1"), ("like qwen3-next", "3d 2x1x2"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("group", FEW)
@pytest.mark.rest("4 ranks")
def test_both_follow_one_process(group: str) -> None:
    compare({case: PLANS[case[1]] for case in FEW[group]}, "fp64", STEPS)


#: the plans with a sequence axis
SEQUENCE: dict[str, Plan] = {
    "ring x 1d": (4, dict(sequence=dict(size=2, mode="ring"), tensor=2), {}),
    "ulysses x pipeline": (4, dict(sequence=dict(size=2, mode="ulysses"), pipeline=2), scheduled("1f1b", 2)),
    "hybrid": (4, dict(sequence=dict(size=4, mode="hybrid")), {}),
}


@pytest.mark.rest("llama chunks-ring x 1d", "like gpt-oss-ulysses x pipeline", "like gemma-ring x 1d")
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("llama", "ring x 1d"),
        ("like gemma", "hybrid"),
        ("like gpt-oss", "ring x 1d"),
        ("llama chunks", "ring x 1d"),
        ("like gpt-oss", "ulysses x pipeline"),
        ("like gemma", "ring x 1d"),
        ("like qwen3-next", "ring x 1d"),
        pytest.param("like qwen3-next", "ulysses x pipeline", marks=pytest.mark.long),
        pytest.param("like qwen3-next", "hybrid", marks=pytest.mark.long),
    ],
)
def test_models_follow_it_under_sequence_parallelism(model: str, plan: str) -> None:
    compare({(model, plan): SEQUENCE[plan]}, "fp64", STEPS, num_kv_heads=4)


@pytest.mark.parametrize("mode", ["ring", *long("ulysses")])
def test_latents_and_next_tokens_follow_it_under_sequence_parallelism(mode: str) -> None:
    tensor = dict(size=2, sequence_sharded=mode == "ulysses")
    plan = 4, dict(sequence=dict(size=2, mode=mode), tensor=tensor), {}
    compare({("llama latent", f"{mode} x 1d"): plan}, "fp64", STEPS, mtp_weight=0.5)


def test_documents_end_what_next_tokens_predict() -> None:
    """A label that is another document's token has no loss, and counts are those of all data ranks."""
    ids = torch.arange(10).view(2, 5)
    batch = {"inputs": dict(ids=ids, documents=torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])), "labels": ids + 1}
    batch["labels"][0, 1] = -100

    def body(context: ParallelContext) -> dict[str, Any]:
        return with_next_tokens(batch, model_parallel_of(context))

    for made in run_ranks(2, body, plan=grid(data=2)):
        assert made["inputs"]["next_ids"].tolist() == [[1, 2, 3, 4, 0], [6, 7, 8, 9, 0]]
        assert made["next_labels"].tolist() == [[-100, 3, -100, 5, -100], [7, 8, 9, 10, -100]]
        assert (made["num_labels"], made["num_next_labels"]) == (2 * 9, 2 * 6)


@pytest.mark.parametrize("precision", long("fp64", "fp32"))
@pytest.mark.parametrize("world", [2, 4, 6, 8])
@pytest.mark.parametrize("model", list(MODELS))
def test_every_plan_follows_one_process_for_twenty_steps(model: str, world: int, precision: str) -> None:
    more = dict(num_kv_heads=6) if model in ("llama tied", "llama qk_norm", "like gemma") and world == 6 else {}
    cases = {(model, name): plan for name, plan in PLANS.items() if plan[0] == world}
    compare(cases, precision, LONG, **more)


@pytest.mark.parametrize("steps", [STEPS, *long(LONG)])
@pytest.mark.parametrize("model", list(MODELS))
def test_one_process_is_plain_torch(model: str, steps: int) -> None:
    sizes = {key: value for key, value in MODELS[model].items() if key != "type"}
    twin = TWINS[MODELS[model]["type"]](**sizes).double()
    assert_is_plain_torch(alone(model, "fp64", steps), twin, sizes, steps, BATCH)


def test_a_wrong_gradient_of_a_class_token_is_seen() -> None:
    config = settings("vit", PLANS["1d sharded 2"], "fp64", STEPS)
    trace = run_plan(2, config, STEPS, "class_token.weight")[0]
    with pytest.raises(AssertionError, match=r"class_token\.weight"):
        assert_same_run(trace, alone("vit", "fp64", STEPS), loss=1e9, norm=1e9, parameter=1e-9)
