"""Numbers of training that users set: weights of samples, parameters of losses, learning rates of parameter groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus

WIDTH = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x).tanh())


def settings(**more: Any) -> dict[str, Any]:
    return (
        dict(train=dict(global_batch_size=8, precision="fp64"), optimizer=dict(type="SGD", lr=0.1), device="cpu") | more
    )


def numbers(step: int = 0) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


def square(outputs: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return outputs.square().sum(), len(batch)


# -- evaluation ---------------------------------------------------------------------------------------------------


def _weighted(weight: float) -> Any:
    return lambda outputs, batch: (weight * (batch.sum(1, keepdim=True) ** 2).sum(), weight * len(batch))


def _evaluate(rank: int, weight: float, size: int) -> tuple[float, float, int]:
    engine = colossus.initialize(settings(parallel=dict(data=size)), model=Net, loss_fn=_weighted(weight))
    part = numbers()[rank * 8 // size : (rank + 1) * 8 // size]
    found = engine.eval_step(part)
    engine.close()
    return found.loss, found.count, found.tokens


@pytest.mark.parametrize("weight", [0.2, 0.03, 1.0])
def test_evaluation_divides_by_the_sum_of_the_weights(weight: float) -> None:
    mean = (numbers().double().sum(1) ** 2).mean().item()
    for rank in run_ranks(2, _evaluate, weight, 2, with_context=False):
        assert rank[0] == pytest.approx(mean, rel=1e-12)
        assert rank[1:] == (pytest.approx(8 * weight), round(8 * weight))


# -- loss functions -----------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        return self.log_scale.exp() * outputs.square().sum() - self.log_scale, len(outputs)


def test_a_loss_function_with_parameters_is_refused() -> None:
    """They are not in the optimizer: the loss would stay at its start, in silence."""
    with pytest.raises(ValueError, match=r"Scaled with parameters of its own.*part of the model"):
        colossus.initialize(settings(), model=Net, loss_fn=Scaled())
    frozen = Scaled().requires_grad_(False)
    engine = colossus.initialize(settings(), model=Net, loss_fn=frozen)
    assert engine.train_step(numbers()).loss > 0


# -- learning rates -----------------------------------------------------------------------------------------------


def grouped(params: Any, lr: float) -> torch.optim.Optimizer:
    """The last two parameters at a fifth of the rate."""
    params = list(params)
    return torch.optim.SGD([{"params": params[:2]}, {"params": params[2:], "lr": 0.02}], lr=lr)


def test_a_parameter_group_keeps_its_own_learning_rate() -> None:
    """It is the group's peak: the schedule, warm-up and decay, is of both."""
    steps = 6
    config = settings(
        optimizer=dict(type=grouped, lr=0.1), lr_schedule=dict(type="linear", warmup_steps=2),
        train=dict(global_batch_size=8, precision="fp64", steps=steps),
    )  # fmt: skip
    engine = colossus.initialize(config, model=Net, loss_fn=square)
    twin = Net().double()
    twin.load_state_dict(engine.model.state_dict())
    optimizer = grouped(twin.parameters(), 0.1)
    shape = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: engine.lr_at(step) / 0.1)
    for step in range(steps):
        engine.train_step(numbers(step))
        optimizer.zero_grad()
        (twin(numbers(step).double()).square().sum() / 8).backward()
        assert [group["lr"] for group in engine.optimizer.param_groups] == pytest.approx(
            [group["lr"] for group in optimizer.param_groups], rel=1e-12
        )
        optimizer.step()
        shape.step()
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())  # a checkpoint keeps it
    for mine, other in zip(engine.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)
