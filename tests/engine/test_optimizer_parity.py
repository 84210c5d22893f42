"""AdamW, SGD with momentum, groups of a function and by rule: ten steps under a plan are those of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.training import SIZES, batch_of, config_of, is_key_bias
from helpers.twins import PlainGPT
from torch import Tensor

import colossus
from colossus.checkpoint.state_dict import full_state_dict

STEPS = 10
MODEL = {**SIZES, "num_layers": 2}
CLIP = 0.5
Named = list[tuple[str, torch.nn.Parameter]]


def two_groups(named: Named) -> torch.optim.Optimizer:
    """No weight decay of what has one dim, at half the rate of the others."""
    decayed = [param for _, param in named if param.ndim > 1]
    others = [param for _, param in named if param.ndim <= 1]
    return torch.optim.AdamW([dict(params=decayed), dict(params=others, lr=1e-3, weight_decay=0.0)], lr=2e-3)


#: no weight decay of biases and norms, a slow embedding, a frozen MLP, and slower the further from the output
RULES: dict[str, Any] = dict(
    type="AdamW", lr=2e-3, betas=(0.8, 0.95), weight_decay=0.1, layer_decay=0.6,
    groups=[
        dict(match=["*.bias", "*norm*"], weight_decay=0.0),
        dict(match="embedding*", lr_scale=0.5, betas=(0.9, 0.99)),
        dict(match="blocks.0.mlp.*", frozen=True),
    ],
)  # fmt: skip


def ruled(named: Named) -> torch.optim.Optimizer:
    """What `RULES` say, one group for each parameter."""
    groups = []
    for name, param in named:
        if name.startswith("blocks.0.mlp."):
            param.requires_grad_(False)
            continue
        depth = int(name.split(".")[1]) if name.startswith("blocks.") else 2 if name[:4] in ("norm", "head") else -1
        is_embedding = name.startswith("embedding")
        group = dict(params=[param], lr=2e-3 * 0.6 ** (2 - depth) * (0.5 if is_embedding else 1.0))
        if is_embedding:
            group["betas"] = (0.9, 0.99)
        if name.endswith(".bias") or "norm" in name:
            group["weight_decay"] = 0.0
        groups.append(group)
    return torch.optim.AdamW(groups, lr=2e-3, betas=(0.8, 0.95), weight_decay=0.1)


#: name -> the config's optimizer or the function that makes one, and the same of plain torch
OPTIMIZERS: dict[str, tuple[dict[str, Any] | None, Callable[[Named], torch.optim.Optimizer]]] = {
    "AdamW": (
        dict(type="AdamW", lr=2e-3, betas=(0.8, 0.95), weight_decay=0.1),
        lambda named: torch.optim.AdamW(named, lr=2e-3, betas=(0.8, 0.95), weight_decay=0.1),
    ),
    "SGD": (
        dict(type="SGD", lr=0.05, momentum=0.9, weight_decay=0.01),
        lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9, weight_decay=0.01),
    ),
    "two groups": (None, two_groups),
    "rules": (RULES, ruled),
}

#: what another plan tells as well
LONG = ("1d_sharded", "2d", "3d_2x1x2", "zero1")
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "1d": (2, dict(tensor=2)),
    "1d_sharded": (2, dict(tensor=dict(size=2, sequence_sharded=True))),
    "2d": (4, dict(tensor=dict(mode="2d", size=4))),
    "3d_2x1x2": (4, dict(tensor=dict(mode="3d", shape=(2, 1, 2)))),
    "data2_pipeline2": (4, dict(data=2, pipeline=2)),
    "zero1": (2, dict(data=2, zero=1)),
    "zero3": (2, dict(data=2, zero=3)),
}


def train(rank: int, plan: dict[str, Any]) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Body of a rank: weights before and after, for each optimizer."""
    found = {}
    for name, (section, factory) in OPTIMIZERS.items():
        config = config_of(plan, STEPS, "fp64", train=dict(clip_grad_norm=CLIP), schedule=dict(microbatches=2))
        config |= dict(model=dict(type="GPT", **MODEL))
        del config["optimizer"]
        config["lr_schedule"] = dict(type="linear", warmup_steps=3, min_ratio=0.1)
        own: dict[str, Any] = dict(optimizer=factory) if section is None else {}
        engine = colossus.initialize(config | ({} if section is None else dict(optimizer=section)), **own)
        start = full_state_dict(engine.model, engine.context)
        part = config["train"]["global_batch_size"] // engine.context.size("data")
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
    optimizer = OPTIMIZERS[name][1](list(model.named_parameters()))
    peaks = [group["lr"] for group in optimizer.param_groups]
    for step in range(STEPS):
        share = (step + 1) / 3 if step < 3 else 0.1 + 0.9 * (1 - (step - 3) / (STEPS - 3))
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * share
        batch = batch_of(step)
        optimizer.zero_grad()
        total, count = model.loss_sum(batch["inputs"], batch["labels"])
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return {key: value.detach() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("plan", [pytest.param(plan, marks=[pytest.mark.long] * (plan in LONG)) for plan in PLANS])
@pytest.mark.rest("1d", "zero3")
def test_ten_steps_are_those_of_plain_torch(plan: str) -> None:
    world, parallel = PLANS[plan]
    # Adam turns the rounding noise that is the gradient of a key bias into steps of full size
    wanted = {name: {key: x for key, x in plain(name).items() if not is_key_bias(key)} for name in OPTIMIZERS}
    for found in run_ranks(world, train, parallel, with_context=False) if world > 1 else [alone()]:
        for name, (start, end) in found.items():
            assert max((end[key] - start[key]).abs().max() for key in end) > 1e-3
            gaps = {key: (end[key] - value).abs().max().item() for key, value in wanted[name].items()}
            worst = max(gaps, key=lambda key: gaps[key])
            assert gaps[worst] <= 1e-9, f"{name}: {worst} differs by {gaps[worst]:.3g}"
