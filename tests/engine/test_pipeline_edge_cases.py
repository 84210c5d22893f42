"""What went wrong once: numbers that were silently wrong under a pipeline, and runs that hung."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import RankError, run_ranks
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.layers import PipelineBlock
from colossus.state.model_state_dict import full_state_dict

WIDTH, SAMPLES = 6, 12


def squares(y: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (y - 0.3).square().sum(), y.shape[0]


def batch_of(step: int) -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def train(
    rank: int,
    factory: Callable[[], nn.Module],
    parallel: dict[str, Any],
    schedule: dict[str, Any],
    bucket_mb: float = 25.0,
) -> tuple[list[float], dict[str, Tensor], list[str]]:
    settings = dict(
        parallel=parallel,
        schedule=schedule,
        optimizer=dict(type="SGD", lr=0.05),
        train=dict(global_batch_size=SAMPLES, precision="fp64", seed=1),
        comm=dict(bucket_mb=bucket_mb),
        device="cpu",
    )
    engine = colossus.initialize(settings, model=factory, loss_fn=squares)
    index, count = engine.context.index("data"), engine.context.size("data")
    size = SAMPLES // count
    numbers: list[float] = []
    for step in range(2):
        result = engine.train_step(batch_of(step)[index * size : (index + 1) * size])
        numbers += [result.loss, result.grad_norm]
    gradients = full_state_dict(engine.model, engine.context, gradients=True)
    names = list(full_state_dict(engine.model, engine.context))
    engine.close()
    return numbers, gradients, names


def assert_same(factory: Callable[[], nn.Module], world: int, parallel: dict[str, Any], kind: str) -> None:
    wanted, wanted_gradients, names = run_ranks(1, train, factory, {}, dict(microbatches=3), with_context=False)[0]
    results = run_ranks(world, train, factory, parallel, dict(type=kind, microbatches=3), with_context=False)
    for numbers, gradients, others in results:
        assert numbers == pytest.approx(wanted, rel=1e-10)
        assert others == names
        for name, value in wanted_gradients.items():
            torch.testing.assert_close(gradients[name], value, rtol=1e-8, atol=1e-11, msg=name)


class Twice(nn.Module):
    """A linear without bias that is used twice: its deferred gradients are two tasks."""

    def __init__(self, linear: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(torch.tanh(self.linear(x)))


def twice(linear: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(Twice(linear) for _ in range(4)))


@pytest.mark.rest("False-1f1b", "True-zb-h1", "False-zb-v", "True-1f1b")
@pytest.mark.parametrize("kind", ["zb-h1", "zb-v", "1f1b"])
@pytest.mark.parametrize("ours", [False, True])
def test_a_weight_used_twice_is_reduced_once(kind: str, ours: bool) -> None:
    linear = (
        (lambda: layers.Linear(WIDTH, WIDTH, bias=False)) if ours else (lambda: nn.Linear(WIDTH, WIDTH, bias=False))
    )
    assert_same(twice(linear), 4, dict(data=2, pipeline=2), kind)


class Reentrant(Twice):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=True)
        return x


def test_a_gradient_that_comes_after_its_sum_has_begun_is_told() -> None:
    factory = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Reentrant(lambda: nn.Linear(WIDTH, WIDTH)))  # noqa: E731
    with pytest.raises(RankError, match="came in several parts, and its sum over ranks had begun after the first"):
        run_ranks(2, train, factory, dict(data=2), dict(microbatches=1), 1e-4, with_context=False, timeout=30)


class Needy(nn.Module):
    """Its second block uses something that only the first one names."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.first.register_buffer("mask", torch.ones(WIDTH))
        self.first.rotation = torch.eye(WIDTH)

    def pipeline_blocks(self) -> list[Any]:
        weight = self.first.weight
        uses = {
            "bias": lambda x: F.linear(x, self.second.weight, self.first.bias),
            "buffer": lambda x: self.second(x) * self.first.mask,
            "closure": lambda x: F.linear(self.second(x), weight),
            "attribute": lambda x: self.second(x) @ self.first.rotation,
        }
        return [self.first, PipelineBlock(uses[self.what], self.second)]


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("bias", "object has no attribute 'bias'(?s:.*)A PipelineBlock must name every module, parameter and buffer"),
        ("buffer", "object has no attribute 'mask'(?s:.*)A PipelineBlock must name every module, parameter and buffer"),
        ("closure", r"stage 1: linear on a tensor of shape \(6, 6\) that has no values here"),
        ("attribute", r"stage 1: \w+ on a tensor of shape \(6, 6\) that has no values here"),
    ],
)
def test_what_a_block_uses_without_naming_it(what: str, expected: str) -> None:
    with pytest.raises(RankError, match=expected):
        run_ranks(2, train, lambda: Needy(what), dict(pipeline=2), dict(microbatches=1), with_context=False, timeout=30)


class InPlace(nn.Module):
    def __init__(self, copies: bool = False) -> None:
        super().__init__()
        self.linear, self.copies = nn.Linear(WIDTH, WIDTH), copies

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear((x.clone() if self.copies else x).mul_(1.5)))


def test_stages_of_one_rank_do_not_share_memory() -> None:
    """A stage that begins in place must not change what the one before has kept: zb-v hands over on one rank."""

    def model(copies: bool) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(InPlace(copies) for _ in range(3)))

    ((wanted, *_),) = run_ranks(1, train, lambda: model(True), {}, dict(microbatches=3), with_context=False)
    schedule = dict(type="zb-v", microbatches=3)
    for numbers, *_ in run_ranks(2, train, lambda: model(False), dict(pipeline=2), schedule, with_context=False):
        assert numbers == pytest.approx(wanted, rel=1e-10)


def test_a_model_that_writes_to_its_input_is_refused() -> None:
    """The last stage, with the loss, has the batch as it was."""
    factory = lambda: nn.Sequential(InPlace(), nn.Linear(WIDTH, WIDTH))  # noqa: E731
    with pytest.raises(
        RankError, match=r"the model writes to its input in place \(inputs, \[12, 6\]\): under a pipeline"
    ):
        run_ranks(2, train, factory, dict(pipeline=2), dict(microbatches=1), with_context=False, timeout=30)
