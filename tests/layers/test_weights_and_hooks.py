"""Weights that change within a step, and hooks: the same numbers and the same calls as in one process."""

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

HIDDEN, BATCH, TOKENS = 8, 12, 3
SPLIT = dict(mode="2d", size=4)


def squares(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return outputs.square().sum(), len(outputs)


def train(rank: int, tensor: dict[str, Any], factory: Callable[[], nn.Module], microbatches: int) -> Any:
    config = dict(parallel=dict(tensor=tensor) if tensor else {}, schedule=dict(microbatches=microbatches),
                  optimizer=dict(type="SGD", lr=0.05), device="cpu",
                  train=dict(global_batch_size=BATCH, precision="fp64", seed=5))  # fmt: skip
    engine = colossus.initialize(config, model=factory, loss_fn=squares)
    x = torch.randn(BATCH, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    numbers = []
    for _ in range(3):
        result = engine.train_step({"inputs": x})
        numbers += [result.loss, result.grad_norm]
    return numbers, full_state_dict(engine.model, engine.context), getattr(engine.model, "calls", 0)


def same(tensor: dict[str, Any], factory: Callable[[], nn.Module], microbatches: int = 3) -> None:
    ((numbers, state, calls),) = run_ranks(1, train, {}, factory, microbatches, with_context=False)
    for mine, weights, my_calls in run_ranks(4, train, tensor, factory, microbatches, with_context=False):
        assert mine == pytest.approx(numbers, rel=1e-10)
        for name, value in state.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-11, msg=name)
        assert my_calls == calls


class Teacher(nn.Module):
    """A teacher that follows its student in every forward pass, as an exponential mean or by an assignment."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.student, self.teacher = layers.Linear(HIDDEN, HIDDEN), layers.Linear(HIDDEN, HIDDEN)
        self.teacher.requires_grad_(False)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        taught = self.teacher(x)
        with torch.no_grad():
            if self.how == "mean":
                self.teacher.weight.mul_(0.9).add_(self.student.weight, alpha=0.1)
            else:
                self.teacher.weight.data = self.teacher.weight.data * 0.9 + 0.1 * self.student.weight.data
        return self.student(x) - taught


class Clipped(nn.Module):
    """Its weights are clipped before every use, the first use in a step included."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.weight.mul_(0.8)
        return self.inner(x)


@pytest.mark.rest("step-<lambda>1", "microbatch-<lambda>0", "microbatch-Clipped")
@pytest.mark.parametrize("factory", [lambda: Teacher("mean"), lambda: Teacher("assignment"), Clipped])
@pytest.mark.parametrize("weights", ["step", "microbatch"])
def test_a_weight_that_changes_within_a_step(weights: str, factory: Callable[[], nn.Module]) -> None:
    same(dict(**SPLIT, weights=weights), factory)


class Hooked(nn.Module):
    """A pair of weights in one block, hooks on them counted; what the hook does is not linear."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = layers.MLP(HIDDEN)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.mlp.up.weight._backward_hooks:
            for linear in (self.mlp.up, self.mlp.down):
                linear.weight.register_hook(self.change)
        return x + self.mlp(x)

    def change(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient.clamp(-0.5, 0.5) + 0.01


@pytest.mark.rest("1-options0", "3-options1", "1-options1")
@pytest.mark.parametrize("options", [dict(weights="microbatch"), dict(weights="step")])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_hook_of_a_weight_is_called_once_for_each_backward(options: dict[str, Any], microbatches: int) -> None:
    same(dict(**SPLIT, **options), Hooked, microbatches)
