"""Optimizers that look at whole parameters: ten steps under a plan are those of one process with plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.training import SIZES, batch_of, config_of, is_key_bias
from helpers.twins import PlainGPT
from torch import Tensor, nn

import colossus
from colossus.checkpoint.state_dict import full_state_dict

STEPS, CLIP = 10, 0.5
MODEL = {**SIZES, "num_layers": 1}
Named = list[tuple[str, nn.Parameter]]


class PlainLAMB(torch.optim.Optimizer):
    """Algorithm 2 of 1904.00962, with bias correction."""

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float) -> None:
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for w in group["params"]:
                state = self.state[w]
                t = state["t"] = state.get("t", 0) + 1
                m = state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * w.grad
                v = state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * w.grad**2
                update = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + group["weight_decay"] * w
                norms = w.norm(), update.norm()
                w -= group["lr"] * (norms[0] / norms[1] if norms[0] > 0 and norms[1] > 0 else 1.0) * update


class PlainLARS(torch.optim.Optimizer):
    """Algorithm 1 of 1708.03888."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for w in group["params"]:
                wd, w_norm, g_norm = 0.01, w.norm(), w.grad.norm()
                local = 0.02 * w_norm / (g_norm + wd * w_norm) if w_norm > 0 and g_norm > 0 else 1.0
                state = self.state[w]
                state["v"] = 0.9 * state.get("v", 0.0) + group["lr"] * local * (w.grad + wd * w)
                w -= state["v"]


class Shampoo(torch.optim.Optimizer):
    """1802.09568 for matrices, SGD for the rest: state of other shapes than the parameter's, a count in the group."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, dict(lr=lr, count=0))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for w in group["params"]:
                if w.grad is None or w.dim() != 2:
                    w -= group["lr"] * (0.0 if w.grad is None else w.grad)
                    continue
                state = self.state[w]
                if not state:
                    state["factors"] = [torch.eye(size, dtype=w.dtype) * 1e-3 for size in w.shape]
                left, right = state["factors"]
                left += w.grad @ w.grad.T
                right += w.grad.T @ w.grad
                w -= group["lr"] * group["count"] ** -0.5 * _root(left) @ w.grad @ _root(right)


def _root(matrix: Tensor) -> Tensor:
    """To the power of -1/4."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ (values ** -0.25).diag() @ vectors.T


def muon_and_adamw(named: Named) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in named if p.dim() == 2 and name.startswith("blocks.")]
    others = [p for _, p in named if all(p is not each for each in matrices)]
    assert len(matrices) == 6
    muon = torch.optim.Muon(matrices, lr=2e-3, weight_decay=0.1)
    return [muon, torch.optim.AdamW(others, lr=1e-3, weight_decay=0.02)]


def params(named: Named) -> list[nn.Parameter]:
    return [param for _, param in named]


#: name -> the config's optimizer and the same of plain torch
OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[Named], list[torch.optim.Optimizer]]]] = {
    "LAMB": (
        dict(type="LAMB", lr=1e-2, weight_decay=0.05),
        lambda named: [PlainLAMB(params(named), lr=1e-2, weight_decay=0.05)],
    ),
    "LARS": (
        dict(type="LARS", lr=0.5, weight_decay=0.01, trust_coefficient=0.02),
        lambda named: [PlainLARS(params(named), lr=0.5)],
    ),
    "Adafactor": (
        dict(type="Adafactor", lr=1e-2, weight_decay=0.02),
        lambda named: [torch.optim.Adafactor(params(named), lr=1e-2, weight_decay=0.02)],
    ),
    "Muon": (dict(type="Muon", lr=2e-3, adamw=dict(lr=1e-3, weight_decay=0.02)), muon_and_adamw),
    "Shampoo": (dict(type=Shampoo, lr=0.02, whole=True), lambda named: [Shampoo(params(named), lr=0.02)]),
}

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


@pytest.mark.parametrize("plan", PLANS)
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
