"""AdamW, SGD with momentum, groups of a function and by rule: some steps under a plan are those of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from helpers.few_steps import Ends, assert_is_plain, few_steps, plain_steps
from helpers.plans import plans
from helpers.ranks import run_ranks
from helpers.training import SIZES
from helpers.twins import PlainGPT
from torch import Tensor

MODEL = {**SIZES, "num_layers": 2}
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
PLANS = plans("alone", "1d", "1d_sharded", "2d", "3d_2x1x2", "data2_pipeline2", "zero1", "zero3")


def train(rank: int, plan: dict[str, Any]) -> dict[str, Ends]:
    """Body of a rank, for each optimizer."""
    found = {}
    for name, (section, factory) in OPTIMIZERS.items():
        own: dict[str, Any] = dict(optimizer=factory) if section is None else {}
        found[name] = few_steps(plan, MODEL, section, **own)
    return found


@cache
def alone() -> dict[str, Ends]:
    return run_ranks(1, train, {}, with_context=False)[0]


@cache
def plain(name: str) -> dict[str, Tensor]:
    """From the weights with which one process of ours starts."""
    model = PlainGPT(**MODEL).double()
    model.load_state_dict(alone()[name][0])
    return plain_steps(model, [OPTIMIZERS[name][1](list(model.named_parameters()))])


@pytest.mark.parametrize("plan", [pytest.param(plan, marks=[pytest.mark.long] * (plan in LONG)) for plan in PLANS])
@pytest.mark.rest("data2_pipeline2", "zero3")
def test_steps_are_those_of_plain_torch(plan: str) -> None:
    world, parallel = PLANS[plan]
    for found in run_ranks(world, train, parallel, with_context=False) if world > 1 else [alone()]:
        for name, ends in found.items():
            assert_is_plain(ends, plain(name), name)
