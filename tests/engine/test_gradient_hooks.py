"""Hooks on gradients, registered between steps on what the model holds then, however parameters are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.state.model_state_dict import full_state_dict

LR = 0.5
#: parallel and precision
WAYS: dict[str, tuple[dict[str, Any], Any]] = {
    "data": (dict(data=2), "fp32"),
    "data bf16": (dict(data=2), "bf16"),
    "data narrow": (dict(data=2), dict(params="bf16")),
    "zero 1": (dict(data=2, zero=1), "fp32"),
    "zero 2": (dict(data=2, zero=2), "fp32"),
    "zero 3": (dict(data=2, zero=3), "fp32"),
    "zero 1 bf16": (dict(data=2, zero=1), "bf16"),
    "zero 3 narrow": (dict(data=2, zero=3), dict(params="bf16")),
    "zero 3 offloaded": (dict(data=2, zero=dict(stage=3, offload=True)), "fp32"),
}


class Two(nn.Module):
    """Torch's and ours; some have a hook from the start, which those that come later do not displace."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.ours, self.norm = nn.Linear(4, 4), layers.Linear(4, 4), nn.LayerNorm(4)
        for param in (self.plain.bias, self.ours.weight, self.norm.weight):
            param.register_hook(lambda grad: grad * 0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.ours(self.plain(x)))


class Run:
    """An engine, and what its steps change each parameter by."""

    def __init__(self, parallel: dict[str, Any], precision: Any) -> None:
        config = dict(
            parallel=parallel,
            train=dict(global_batch_size=8, precision=precision, clip_grad_norm=None),
            optimizer=dict(type="SGD", lr=LR),
            lr_schedule=dict(type="constant", warmup_steps=0),
            device="cpu",
        )
        self.engine = colossus.initialize(
            config, model=Two, loss_fn=lambda out, x: ((out.float() - x.roll(1, 1)).square().sum(), len(out))
        )
        self.start = self.state()

    def state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in full_state_dict(self.engine.model, self.engine.context).items()}

    def step(self) -> dict[str, Tensor]:
        """By what one step from the start changes them."""
        colossus.checkpoint.load_full_state_dict(self.engine.model, self.start, self.engine.context)
        context = self.engine.context
        part, index = 8 // context.size("data"), context.index("data")
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
        self.engine.train_step(x[index * part : (index + 1) * part])
        return {name: value - self.start[name] for name, value in self.state().items()}


def _hooks(rank: int, parallel: dict[str, Any], precision: Any) -> list[str]:
    """What is not as it should be."""
    run = Run(parallel, precision)
    problems: list[str] = []
    plain = run.step()
    if any(not change.any() for change in plain.values()):
        problems.append("a step that changes nothing")

    def compare(what: str, change: dict[str, Tensor], share: Callable[[str], float]) -> None:
        for name, value in plain.items():
            if not torch.allclose(change[name], share(name) * value, rtol=1e-5, atol=1e-6):
                problems.append(
                    f"{what}: {name} changes by {change[name].norm():.3g}, not {share(name)} {value.norm():.3g}"
                )

    calls: dict[str, list[str]] = {"tensor": [], "post": []}
    handles: list[Any] = []
    for name, param in run.engine.model.named_parameters():

        def halve(grad: Tensor, name: str = name) -> Tensor:
            calls["tensor"].append(name)
            return grad * (0.0 if name.startswith("plain") else 0.5)

        def note(param: Tensor, name: str = name) -> None:
            calls["post"].append(name)
            if param.grad is None:
                problems.append(f"{name}: called without a gradient")

        handles += [param.register_hook(halve), param.register_post_accumulate_grad_hook(note)]
    compare("hooked", run.step(), lambda name: 0.0 if name.startswith("plain") else 0.5)
    for kind, names in calls.items():
        if sorted(names) != sorted(plain):
            problems.append(f"{kind} hooks of {names}")
    for handle in handles:
        handle.remove()
    for names in calls.values():
        names.clear()
    compare("removed", run.step(), lambda name: 1.0)
    if any(calls.values()):
        problems.append(f"called after they were removed: {calls}")
    run.engine.close()
    return problems


def _of_all_ways(rank: int) -> dict[str, list[str]]:
    return {name: _hooks(rank, *way) for name, way in WAYS.items()}


def test_hooks_registered_between_steps_are_called_however_parameters_are_stored() -> None:
    for problems in run_ranks(2, _of_all_ways, with_context=False):
        assert {name: lines for name, lines in problems.items() if lines} == {}


@pytest.mark.parametrize("precision", ["fp32", dict(params="bf16")], ids=["wide", "narrow"])
def test_and_in_one_process(precision: Any) -> None:
    assert _hooks(0, {}, precision) == []
