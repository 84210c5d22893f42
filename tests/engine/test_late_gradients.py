"""Parameters whose first gradient comes late, under optimizers whose first step of a parameter is another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus.state.model_state_dict import full_state_dict

STEPS, LATE, BATCH = 5, 2, 4
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "momentum": dict(type="SGD", lr=0.1, momentum=0.9),
    "nesterov and decay": dict(type="SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "dampening": dict(type="SGD", lr=0.1, momentum=0.9, dampening=0.5),
    "AdamW": dict(type="AdamW", lr=0.1),
}
PLANS: dict[str, dict[str, Any]] = {
    "one process": {},
    "data 2": dict(data=2),
    "zero 1": dict(data=2, zero=1),
    "zero 3": dict(data=2, zero=3),
    "1d 2": dict(tensor=2),
}


class Late(nn.Module):
    """Two parts that begin late, one of which is then left out again."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.late, self.once = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, step: int) -> Tensor:
        h = self.always(x)
        h = h + self.late(x) if step >= LATE else h
        return h + self.once(x) if step == LATE else h


def inputs(step: int) -> Tensor:
    return torch.arange(BATCH * 4, dtype=torch.float64).add(step).sin().view(BATCH, 4)


def loss_fn(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return outputs.square().sum(), outputs.numel()


def train(rank: int, plan: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """By optimizer, full weights before and after."""
    states = {}
    for name, optimizer in OPTIMIZERS.items():
        train = dict(global_batch_size=BATCH, precision="fp64")
        config = dict(parallel=plan, optimizer=optimizer, train=train, device="cpu")
        engine = colossus.initialize(config, model=colossus.parallelize(Late), loss_fn=loss_fn)
        start = {key: value.clone() for key, value in full_state_dict(engine.model, engine.context).items()}
        size = BATCH // engine.context.size("data")
        first = engine.context.index("data") * size
        for step in range(STEPS):
            engine.train_step({"x": inputs(step)[first : first + size], "step": step})
        states[name] = start, full_state_dict(engine.model, engine.context)
        engine.close()
    return states


@pytest.mark.rest("data 2", "zero 1", "1d 2")
@pytest.mark.parametrize("plan", PLANS)
def test_a_first_gradient_that_comes_late_steps_as_in_plain_torch(plan: str) -> None:
    world = 1 if plan == "one process" else 2
    for name, (start, end) in run_ranks(world, train, PLANS[plan], with_context=False)[0].items():
        model = Late().double()
        model.load_state_dict(start)
        options = {key: value for key, value in OPTIMIZERS[name].items() if key != "type"}
        optimizer = getattr(torch.optim, OPTIMIZERS[name]["type"])(model.parameters(), **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            total, count = loss_fn(model(inputs(step), step), None)
            (total / count).backward()
            optimizer.step()
        for key, value in model.state_dict().items():
            torch.testing.assert_close(
                end[key], value, rtol=1e-10, atol=1e-10, msg=lambda m, k=key, n=name: f"{n} {k} {m}"
            )
