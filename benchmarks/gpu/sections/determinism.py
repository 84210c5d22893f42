"""The same run twice gives the same bits, under torch's deterministic algorithms and as it comes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from helpers.training import batch_of, config_of

import colossus
from benchmarks.gpu.section import Case, Figures

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


def cases(device: torch.device, budget: float) -> Iterator[Case]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when the device is first used
    for name in MODELS:
        for precision in ("fp32", "bf16"):
            yield Case(f"{name} {precision}, as it comes", partial(_twice, device, name, precision, False))
    for name in MODELS:
        for precision in ("fp32", "bf16"):
            yield Case(f"{name} {precision}, deterministic", partial(_twice, device, name, precision, True))


def _twice(device: torch.device, name: str, precision: str, is_asked: bool) -> Figures:
    """What is not asked for is a figure; what is has to be there."""
    torch.use_deterministic_algorithms(is_asked)
    try:
        first, second = _run(device, name, precision), _run(device, name, precision)
    finally:
        torch.use_deterministic_algorithms(False)
    differ = [key for key in first if not torch.equal(first[key], second[key])]
    assert not (is_asked and differ), f"{len(differ)} of {len(first)} differ, among them {differ[:3]}"
    return {"same bits": "yes" if not differ else "no", "compared": len(first)}


def _run(device: torch.device, name: str, precision: str) -> dict[str, torch.Tensor]:
    sizes = MODELS[name]
    engine = colossus.initialize(config_of({}, STEPS, precision, model=sizes, device=device.type))
    found = {}
    for step in range(STEPS):
        batch = {key: value.to(device) for key, value in batch_of(step, sizes).items()}
        found[f"loss of step {step}"] = torch.tensor(engine.train_step(batch).loss)
    found |= {key: value.detach().clone() for key, value in engine.model.named_parameters()}
    engine.close()
    return found
