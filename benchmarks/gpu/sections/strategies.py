"""What replicas exchange, on the device and on the CPU: the same run, for those whose order does not depend on time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from helpers.training import Trace, relative, train

from benchmarks.gpu.ranks import RankPool
from benchmarks.gpu.section import Case, Figures
from benchmarks.gpu.trained import run_of

STEPS, REPLICAS = 6, 4
#: steps between sync points of those that meet
PERIOD = 3
STRATEGIES: dict[str, dict[str, Any]] = {
    "all_reduce": dict(type="all_reduce"),
    "all_reduce bf16": dict(type="all_reduce", compress="bf16"),
    "all_reduce powersgd": dict(type="all_reduce", compress="powersgd", rank=4, start_step=2),
    "hierarchical": dict(type="hierarchical", hosts=2),
    "sgp": dict(type="sgp"),
    "d-psgd": dict(type="d-psgd", graph="ring"),
    "local_sgd": dict(type="local_sgd", period=PERIOD),
    "slowmo": dict(type="slowmo", period=PERIOD),
    "diloco": dict(type="diloco", period=PERIOD),
}
#: which of the others a replica hears of first is a matter of time: they are run, and have to learn
BY_ARRIVAL: dict[str, dict[str, Any]] = {
    "sgp overlap 1": dict(type="sgp", overlap=1),
    "ad-psgd": dict(type="ad-psgd"),
}
#: gaps of losses, relative: what compression rounds may round the other way
ALLOWED = {"all_reduce bf16": 1e-4, "all_reduce powersgd": 1e-6}


def cases(device: torch.device, budget: float) -> Iterator[Case]:
    pool, host = RankPool(device), RankPool(torch.device("cpu"))
    for name, strategy in STRATEGIES.items():
        yield Case(name, partial(_same, pool, host, strategy, ALLOWED.get(name, 1e-9)), seconds=75)
    for name, strategy in BY_ARRIVAL.items():
        yield Case(f"{name}: runs", partial(_runs, pool, strategy), seconds=75)
    pool.close()
    host.close()


def body(rank: int, device: torch.device, config: dict[str, Any]) -> Trace:
    return train(rank, config, STEPS)


def _config(pool: RankPool, strategy: dict[str, Any]) -> dict[str, Any]:
    plan = dict(data=REPLICAS, strategy=strategy)
    return run_of(plan, pool.device, optimizer=dict(lr=1e-2), lr_schedule=dict(warmup_steps=2))


def _same(pool: RankPool, host: RankPool, strategy: dict[str, Any], allowed: float) -> Figures:
    found = pool.run(REPLICAS, body, _config(pool, strategy))
    wanted = host.run(REPLICAS, body, _config(host, strategy))
    gaps = [
        relative(mine, other)
        for one, two in zip(found, wanted, strict=True)
        for mine, other in zip(one.losses, two.losses, strict=True)
    ]
    assert max(gaps) <= allowed, f"losses differ by {max(gaps):.2g} of themselves, {allowed} is allowed"
    return {"loss gap": max(gaps)}


def _runs(pool: RankPool, strategy: dict[str, Any]) -> Figures:
    found = pool.run(REPLICAS, body, _config(pool, strategy))
    first, last = (sum(trace.losses[step] for trace in found) / REPLICAS for step in (0, -1))
    assert all(value.isfinite().all() for trace in found for value in trace.end.values())
    return {"first loss": first, "last loss": last}
