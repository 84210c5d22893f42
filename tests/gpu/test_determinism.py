"""The same run twice gives the same bits, by default and under torch's deterministic algorithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.device_ranks import DeviceRanks
from helpers.training import batch_of, config_of

import colossus

STEPS = 5
DECODER: dict[str, Any] = dict(num_layers=2, hidden_size=64, num_heads=4, vocab_size=53, seq_len=32)
MODELS: dict[str, dict[str, Any]] = {
    "GPT": dict(type="GPT", dropout=0.1, attention_dropout=0.1, **DECODER),
    "Llama": dict(type="Llama", ffn_hidden_size=96, num_kv_heads=2, **DECODER),
    "ViT": dict(
        type="ViT", image_size=(8, 8), patch_size=4, in_channels=3, num_classes=7, num_layers=2, hidden_size=64,
        num_heads=4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_run_twice(
    ranks: DeviceRanks, figures: Callable[[Any], None], name: str, precision: str, deterministic: bool
) -> None:
    differing, compared = ranks.run_one(train_twice, name, precision, deterministic)
    figures({"same bits": not differing})
    assert not (deterministic and differing), f"{len(differing)} of {compared} differ, among them {differing[:3]}"


def train_twice(
    rank: int, device: torch.device, name: str, precision: str, deterministic: bool
) -> tuple[list[str], int]:
    torch.use_deterministic_algorithms(deterministic)
    try:
        first, second = train_once(device, name, precision), train_once(device, name, precision)
    finally:
        torch.use_deterministic_algorithms(False)
    return [key for key in first if not torch.equal(first[key], second[key])], len(first)


def train_once(device: torch.device, name: str, precision: str) -> dict[str, torch.Tensor]:
    sizes = MODELS[name]
    engine = colossus.initialize(config_of({}, STEPS, precision, model=sizes, device=device.type))
    tensors = {}
    for step in range(STEPS):
        batch = {key: value.to(device) for key, value in batch_of(step, sizes).items()}
        tensors[f"loss of step {step}"] = torch.tensor(engine.train_step(batch).loss)
    tensors |= {key: value.detach().clone() for key, value in engine.model.named_parameters()}
    engine.close()
    return tensors
