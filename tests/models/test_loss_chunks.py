"""Head and loss in chunks of tokens, and weights of tokens: every plan follows one process, and that plain torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from helpers.laws import assert_parity
from helpers.long import but
from helpers.training import Trace, assert_is_plain_torch, batch_of, config_of, run_cases, scheduled
from helpers.twins import PlainGPT
from torch import Tensor

STEPS, BATCH = 3, 24
SIZES: dict[str, Any] = dict(num_layers=2, hidden_size=24, num_heads=12, vocab_size=53, seq_len=16)
#: 16 tokens of each sample in chunks of 3 at 8 rows: the last one is shorter
MODELS: dict[str, dict[str, Any]] = {
    "tied": dict(SIZES, loss_chunk=24, z_loss=1e-3, label_smoothing=0.1, logit_cap=2.0),
    "untied": dict(SIZES, loss_chunk=1, tie_embeddings=False),
    "mtp": dict(SIZES, loss_chunk=7, mtp_weight=0.4, z_loss=1e-3),
    "whole": dict(SIZES, z_loss=1e-3),
}


PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "data 2": (2, dict(data=2), scheduled("1f1b", 2)),
    "1d 2": (2, dict(tensor=2), {}),
    "1d sharded": (2, dict(tensor=dict(size=2, sequence_sharded=True)), {}),
    "pipeline 2": (2, dict(pipeline=2), scheduled("1f1b")),
    "sequence 2": (2, dict(sequence=2), {}),
    "zero 3": (2, dict(data=2, zero=3), {}),
    "data 4": (4, dict(data=4), {}),
    "2d": (4, dict(tensor=dict(mode="2d", size=4)), {}),
    "2d for a step": (4, dict(tensor=dict(mode="2d", size=4, weights="step")), scheduled("1f1b", 2)),
    "3d 2x1x2": (4, dict(tensor=dict(mode="3d", shape=(2, 1, 2))), {}),
    "zb-v x 1d": (4, dict(pipeline=2, tensor=2), scheduled("zb-v")),
    "zb-h1 x zero 3": (4, dict(data=2, pipeline=2, zero=3), scheduled("zb-h1")),
    "sequence x 1d": (4, dict(sequence=2, tensor=dict(size=2, sequence_sharded=True)), {}),
    "3d": (8, dict(tensor=dict(mode="3d", size=8)), {}),
    "2.5d": (8, dict(tensor=dict(mode="2.5d", size=8, depth=2)), {}),
    "data x pipeline x 1d": (8, dict(data=2, pipeline=2, tensor=2), scheduled("1f1b", 2)),
}


def weighted(step: int, sizes: dict[str, Any], batch: int) -> dict[str, Tensor]:
    """`batch_of` with weights of tokens, some of them 0."""
    made = batch_of(step, sizes, batch)
    weights = torch.rand(made["labels"].shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return {**made, "token_weights": weights * (weights > 0.2) * 3}


def settings(model: str, parallel: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    sizes = dict(MODELS[model], type="GPT")
    return config_of(parallel, STEPS, "fp64", model=sizes, train=dict(global_batch_size=BATCH), **more)


@cache
def alone(model: str) -> Trace:
    return run_cases(1, {model: settings(model, {}, {})}, STEPS, weighted)[model][0]


@pytest.mark.rest("tied-2", "mtp-4")
@pytest.mark.parametrize("world", but([8], [2, 4, 8]))
@pytest.mark.parametrize("model", but(["untied", "whole"], MODELS))
def test_every_plan_follows_one_process(model: str, world: int) -> None:
    configs = {name: settings(model, *rest) for name, (ranks, *rest) in PLANS.items() if ranks == world}
    for name, traces in run_cases(world, configs, STEPS, weighted).items():
        assert_parity(traces, alone(model), "fp64", name)


@pytest.mark.parametrize("model", MODELS)
def test_one_process_is_plain_torch(model: str) -> None:
    sizes = {key: value for key, value in MODELS[model].items() if key != "loss_chunk"}
    trace = alone(model)
    assert_is_plain_torch(trace, PlainGPT(**sizes).double(), sizes, STEPS, BATCH, weighted)
    want = weighted(0, sizes, BATCH)
    assert trace.tokens[0] == round((want["token_weights"] * (want["labels"] != -100)).sum().item())
