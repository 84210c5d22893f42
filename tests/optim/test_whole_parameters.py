"""Optimizers that look at whole parameters: ten steps under a plan are those of one process with plain torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from helpers.long import but
from helpers.ranks import run_ranks
from helpers.training import SIZES, batch_of, config_of, is_key_bias
from helpers.twins import PlainGPT
from helpers.whole_optimizers import OPTIMIZERS
from torch import Tensor

import colossus
from colossus.checkpoint.state_dict import full_state_dict

STEPS, CLIP = 10, 0.5
MODEL = {**SIZES, "num_layers": 1}

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "1d": (2, dict(tensor=2)),
    "2d": (4, dict(tensor=dict(mode="2d", size=4))),
    "2.5d": (8, dict(tensor=dict(mode="2.5d", size=8, depth=2))),
    "3d": (8, dict(tensor=dict(mode="3d", size=8))),
    "data2_pipeline2": (4, dict(data=2, pipeline=2)),
    "zero1": (2, dict(data=2, zero=1)),
    "zero2_1d": (4, dict(data=2, tensor=2, zero=2)),
    "zero3": (2, dict(data=2, zero=3)),
}


def config_for(plan: dict[str, Any], name: str) -> dict[str, Any]:
    config = config_of(plan, STEPS, "fp64", train=dict(clip_grad_norm=CLIP), schedule=dict(microbatches=2))
    config |= dict(model=dict(type="GPT", **MODEL), optimizer=OPTIMIZERS[name][0])
    config["lr_schedule"] = dict(type="linear", warmup_steps=3, min_ratio=0.1)
    return config


def train(rank: int, plan: dict[str, Any]) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Body of a rank: weights before and after, for each optimizer."""
    found = {}
    for name in OPTIMIZERS:
        engine = colossus.initialize(config_for(plan, name))
        start = full_state_dict(engine.model, engine.context)
        part = engine.config.train.global_batch_size // engine.context.size("data")
        rows = slice(engine.context.index("data") * part, (engine.context.index("data") + 1) * part)
        for step in range(STEPS):
            engine.train_step({key: value[rows] for key, value in batch_of(step).items()})
        found[name] = start, full_state_dict(engine.model, engine.context)
        engine.close()
    return found


@cache
def alone() -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    return run_ranks(1, train, {}, with_context=False)[0]


@cache
def plain(name: str) -> dict[str, Tensor]:
    """The weights of plain torch's run, from those with which one process of ours starts."""
    model = PlainGPT(**MODEL).double()
    model.load_state_dict(alone()[name][0])
    optimizers = OPTIMIZERS[name][1](list(model.named_parameters()))
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peaks = [group["lr"] for group in groups]
    for step in range(STEPS):
        share = (step + 1) / 3 if step < 3 else 0.1 + 0.9 * (1 - (step - 3) / (STEPS - 3))
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * share
        batch = batch_of(step)
        model.zero_grad()
        total, count = model.loss_sum(batch["inputs"], batch["labels"])
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for optimizer in optimizers:
            optimizer.step()
    return {key: value.detach() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("plan", but(("1d", "2.5d", "3d", "zero1", "zero2_1d"), PLANS))
def test_ten_steps_are_those_of_plain_torch(plan: str) -> None:
    world, parallel = PLANS[plan]
    # what is divided by its own size turns the rounding noise that is the gradient of a key bias into steps
    wanted = {name: {key: x for key, x in plain(name).items() if not is_key_bias(key)} for name in OPTIMIZERS}
    for found in run_ranks(world, train, parallel, with_context=False) if world > 1 else [alone()]:
        for name, (start, end) in found.items():
            assert max((end[key] - start[key]).abs().max() for key in end) > 1e-3
            gaps = {key: (end[key] - value).abs().max().item() for key, value in wanted[name].items()}
            worst = max(gaps, key=lambda key: gaps[key])
            assert gaps[worst] <= 1e-9, f"{name}: {worst} differs by {gaps[worst]:.3g}"
