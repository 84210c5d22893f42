"""Tables with sparse gradients on the device, their rows summed in each way, against one process on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from helpers import tables
from helpers.training import config_of, relative

from benchmarks.gpu.ranks import RankPool
from benchmarks.gpu.section import Case, Figures

#: ranks, plan, strategy
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "all_reduce": (2, dict(data=2)),
    "dense": (2, dict(data=2, strategy=dict(type="hybrid", ways={"*": "dense"}))),
    "gathered rows": (2, dict(data=2, strategy=dict(type="hybrid", ways={"*": "gather"}))),
    "owners": (2, dict(data=2, strategy=dict(type="hybrid", ways={"*": "owners"}))),
    "owners, tensor 2": (4, dict(data=2, tensor=2, strategy=dict(type="hybrid", ways={"*": "owners"}))),
}
RULES = ("SGD", "Adagrad")


def cases(device: torch.device, budget: float) -> Iterator[Case]:
    pool, host = RankPool(device), RankPool(torch.device("cpu"))
    for name in PLANS:
        for rule in RULES:
            yield Case(f"{name}, {rule}", partial(_same, pool, host, name, rule))
    pool.close()
    host.close()


def _config(device: torch.device, plan: dict[str, Any], rule: str) -> dict[str, Any]:
    config = config_of(
        plan, tables.STEPS, "fp64", train=dict(global_batch_size=tables.SAMPLES), optimizer=dict(type="SGD", lr=0.1),
        comm=dict(backend="gloo") if device.type == "cuda" else {}, device=device.type,
    )  # fmt: skip
    tables_by = {} if rule == "SGD" else {"tables": dict(type=rule, lr=0.1)}
    return {**config, "model": None, "optimizer": dict(type="SGD", lr=0.1, **tables_by)}


def _body(rank: int, device: torch.device, plan: dict[str, Any], rule: str) -> tables.Run:
    run = tables.train(_config(device, plan, rule))
    run.weights = [{name: value.cpu() for name, value in weights.items()} for weights in run.weights]
    run.outputs, run.state = run.outputs.cpu(), {}
    return run


def _same(pool: RankPool, host: RankPool, name: str, rule: str) -> Figures:
    world, plan = PLANS[name]
    by_rank = pool.run(world, _body, plan, rule)
    (wanted,) = host.run(1, _body, {}, rule)
    for rank, found in enumerate(by_rank):
        for step, (mine, other) in enumerate(zip(found.weights, wanted.weights, strict=True)):
            for key, value in other.items():
                gap = (mine[key] - value).abs().max().item()
                assert gap < 1e-10, f"rank {rank}, after {step} steps: {key} is off by {gap:.2g}"
    return {"loss gap": max(map(relative, by_rank[0].losses, wanted.losses)), "tables": len(tables.TABLES)}
