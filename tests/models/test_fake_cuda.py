"""Steps and evaluations of all models on CUDA devices that do not exist, also of 512 of them."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.fake_cuda import Waits, batch_on_device, run_fake_ranks
from helpers.long import long
from helpers.training import batch_of, config_of

import colossus

GPT: dict[str, Any] = dict(type="GPT", num_layers=2, hidden_size=24, num_heads=4, vocab_size=53, seq_len=12)
LLAMA: dict[str, Any] = dict(
    type="Llama", num_layers=2, hidden_size=48, num_heads=8, num_kv_heads=2, ffn_hidden_size=64, vocab_size=61,
    seq_len=12, rotary_scaling=dict(factor=8.0, original_max_position_embeddings=16),
)  # fmt: skip
VIT: dict[str, Any] = dict(
    type="ViT", num_layers=2, hidden_size=24, num_heads=4, image_size=(8, 12), patch_size=(4, 4), in_channels=3,
    num_classes=10,
)  # fmt: skip
#: for so many ranks that nothing smaller divides
WIDE: dict[str, Any] = dict(
    type="GPT", num_layers=1, hidden_size=256, num_heads=16, vocab_size=517, seq_len=16, dropout=0.1
)
CUBE: dict[str, Any] = dict(
    type="GPT", num_layers=1, hidden_size=32, num_heads=4, ffn_hidden_size=64, vocab_size=53, seq_len=4, dropout=0.1
)

TENSOR = {
    "1d": dict(mode="1d", size=4),
    "1d sequence": dict(mode="1d", size=4, sequence_sharded=True),
    "2d": dict(mode="2d", size=4),
    "2.5d": dict(mode="2.5d", size=8, depth=2),
    "3d": dict(mode="3d", size=8),
}
#: name -> world, plan, batch, model, what else the config says
Case = tuple[int, dict[str, Any], int, dict[str, Any], dict[str, Any]]


def of(tensor: str, sizes: dict[str, Any], batch: int = 8, **more: Any) -> Case:
    section: dict[str, Any] = TENSOR[tensor]
    return section["size"] * 2, dict(data=2, tensor=section), batch, sizes, more


def alone(sizes: dict[str, Any], **more: Any) -> Case:
    return 1, dict(data=1), 8, sizes, more


def recomputed(**options: Any) -> dict[str, Any]:
    return dict(train=dict(activation_checkpoint=options), model=dict(dropout=0.1, attention_dropout=0.1))


CASES: dict[str, Case] = {
    "GPT, selective": alone(GPT, **recomputed(type="selective")),
    "ViT, 2.5d": of("2.5d", VIT),
    "GPT, 3d of 4 x 4 x 4, data 8": (512, dict(data=8, tensor=dict(mode="3d", size=64)), 128, CUBE, {}),
}
MORE: dict[str, Case] = {
    **{f"{model['type']}, {tensor}": of(tensor, model) for model in (GPT, LLAMA, VIT) for tensor in TENSOR},
    "Llama": alone(LLAMA),
    "2d of 16 x 16, data 2": (512, dict(data=2, tensor=dict(mode="2d", size=256)), 64, WIDE, {}),
}


def body(rank: int, cases: dict[str, Case], precision: str) -> dict[str, list[str]]:
    """What waits in a step, by case."""
    found = {}
    for name, (_, plan, whole, model, more) in cases.items():
        try:
            waits = steps(plan, whole, model, more, precision)
        except Exception as error:
            error.add_note(f"in the case {name!r}, {precision}")
            raise
        if waits:
            found[name] = waits
    return found


def steps(plan: dict[str, Any], whole: int, model: dict[str, Any], more: dict[str, Any], precision: str) -> list[str]:
    more = {**more, "model": {**model, **more.get("model", {})}}
    more["train"] = {"global_batch_size": whole, **more.get("train", {})}
    engine = colossus.initialize(config_of(plan, 9, precision, device="cuda", **more))
    local = whole // engine.context.size("data")
    batch = batch_on_device({key: x[:local] for key, x in batch_of(0, model, whole).items()})
    engine.train_step(batch)
    with Waits(allowed=True) as waits:
        engine.train_step(batch)
    engine.eval_step(batch)
    engine.train_step(batch)
    assert all(each.is_cuda for each in (*engine.model.parameters(), *engine.model.buffers()))
    engine.close()
    return waits.found


def by_world(cases: dict[str, Case]) -> dict[int, dict[str, Case]]:
    worlds: dict[int, dict[str, Case]] = {}
    for name, case in cases.items():
        worlds.setdefault(case[0], {})[name] = case
    return worlds


@pytest.mark.long
@pytest.mark.parametrize("world", by_world(CASES))
def test_a_step_waits_for_nothing(world: int) -> None:
    assert run_fake_ranks(world, body, by_world(CASES)[world], "bf16") == [{}]


@pytest.mark.parametrize("precision", long("fp64", "fp32", "fp16", "bf16"))
@pytest.mark.parametrize("world", by_world(CASES | MORE))
def test_all_steps(world: int, precision: str) -> None:
    """Of the first rank and of the last."""
    ranks = sorted({0, world - 1})
    cases = by_world(CASES | MORE)[world]
    assert run_fake_ranks(world, body, cases, precision, ranks=ranks) == [{}] * len(ranks)
