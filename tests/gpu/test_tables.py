"""Tables with sparse gradients on the device, their rows summed in each way, against plain torch in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import tables
from helpers.device_ranks import DeviceRanks
from helpers.training import config_of

#: world size, plan, strategy
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "all_reduce": (2, dict(data=2)),
    "dense": (2, dict(data=2, strategy=dict(type="hybrid", ways={"*": "dense"}))),
    "gathered rows": (2, dict(data=2, strategy=dict(type="hybrid", ways={"*": "gather"}))),
    "owners": (2, dict(data=2, strategy=dict(type="hybrid", ways={"*": "owners"}))),
    "owners, tensor 2": (4, dict(data=2, tensor=2, strategy=dict(type="hybrid", ways={"*": "owners"}))),
}
CLIP = 1.0


@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
@pytest.mark.parametrize("name", PLANS)
def test_tables(ranks: DeviceRanks, host_ranks: DeviceRanks, name: str, rule: str) -> None:
    world, plan = PLANS[name]
    train = dict(global_batch_size=tables.SAMPLES, clip_grad_norm=CLIP)
    config = config_of(
        plan, tables.STEPS, "fp64", train=train, comm=ranks.comm(world), device=ranks.device.type,
        lr_schedule=dict(type="constant", warmup_steps=0),
    )  # fmt: skip
    by_rank = ranks.run(world, train_tables, {**config, "model": None, "optimizer": tables.RULES[rule][0]})
    expected = host_ranks.run_one(train_in_torch, rule, by_rank[0].weights[0])
    for rank, run in enumerate(by_rank):
        tables.assert_same(run, expected, f"rank {rank}")


def train_tables(rank: int, device: torch.device, config: dict[str, Any]) -> tables.Run:
    run = tables.train(config)
    run.weights = [{name: value.cpu() for name, value in weights.items()} for weights in run.weights]
    run.outputs, run.state = run.outputs.cpu(), {}
    return run


def train_in_torch(rank: int, device: torch.device, rule: str, start: dict[str, torch.Tensor]) -> tables.Run:
    return tables.in_torch(rule, start, CLIP)
