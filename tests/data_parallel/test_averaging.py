"""Local SGD, SlowMo and DiLoCo by their own recurrences in plain torch; and what they are equal to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from helpers.long import but
from helpers.plain_replicas import Replica, assert_is_replica, share_of
from helpers.plans import plans
from helpers.ranks import run_ranks
from helpers.training import config_of, run_cases
from torch import Tensor

import colossus

STEPS, BATCH, LR = 7, 12, 0.05
SGD: dict[str, Any] = dict(type="SGD", lr=LR, momentum=0.9, weight_decay=0.01)
PLAIN_SGD: dict[str, Any] = dict(type="SGD", lr=LR, momentum=0.0, weight_decay=0.0)
ADAMW: dict[str, Any] = dict(type="AdamW", lr=0.01, weight_decay=0.1)


def settings(
    strategy: dict[str, Any] | None, parallel: dict[str, Any], optimizer: dict[str, Any], clip: float | None = None
) -> dict[str, Any]:
    plan = parallel if strategy is None else {**parallel, "strategy": strategy}
    return config_of(
        plan,
        STEPS,
        "fp64",
        train=dict(global_batch_size=BATCH, clip_grad_norm=clip),
        schedule=dict(microbatches=3 if "pipeline" in parallel else 1),
        lr_schedule=dict(type="cosine", warmup_steps=2, min_ratio=0.1),
        optimizer=optimizer,
    )


def lr_of(step: int, peak: float) -> float:
    if step < 2:
        return peak * (step + 1) / 2
    progress = torch.tensor((step - 2) / (STEPS - 2), dtype=torch.float64)
    return peak * (0.1 + 0.9 * 0.5 * (1 + torch.cos(torch.pi * progress).item()))


class Rounds:
    """The recurrence, in plain torch: local steps, averages weighted by tokens, outer steps.

    Args:
        outer: of a parameter's (anchor, average, memory, mean learning rate) the values that all go on from.
    """

    def __init__(
        self,
        num_replicas: int,
        optimizer: dict[str, Any],
        *,
        period: int,
        clip: float | None = None,
        outer: Callable[[Tensor, Tensor, dict[str, Tensor], float], Tensor] = lambda anchor, average, memory, lr: (
            average
        ),
    ) -> None:
        kind, options = optimizer["type"], {key: value for key, value in optimizer.items() if key != "type"}
        make = lambda params: getattr(torch.optim, kind)(params, **options)  # noqa: E731
        self.replicas = [Replica(make, clip) for _ in range(num_replicas)]
        anchors = [param.detach().clone() for param in self.replicas[0].params]
        memories: list[dict[str, Tensor]] = [{} for _ in anchors]
        tokens = [0] * num_replicas
        rates: list[float] = []
        self.losses: list[float] = []
        for step in range(STEPS):
            lr = lr_of(step, options["lr"])
            for replica in self.replicas:
                for group in replica.optimizer.param_groups:
                    group["lr"] = lr
            sums = [
                replica.gradients(share_of(step, index, num_replicas, BATCH))
                for index, replica in enumerate(self.replicas)
            ]
            self.losses.append(sum(total for total, _ in sums) / sum(count for _, count in sums))
            rates.append(lr)
            for index, (replica, (_, count)) in enumerate(zip(self.replicas, sums, strict=True)):
                replica.update(count)
                tokens[index] += count
            if (step + 1) % period:
                continue
            for at in range(len(anchors)):
                parts = [replica.params[at].detach() for replica in self.replicas]
                average = sum(own / sum(tokens) * part for own, part in zip(tokens, parts, strict=True))
                anchors[at] = outer(anchors[at], average, memories[at], sum(rates) / len(rates))
                for part in parts:
                    part.copy_(anchors[at])
            tokens = [0] * num_replicas
            rates.clear()


def diloco_outer(lr: float, momentum: float, nesterov: bool = True) -> Callable[..., Tensor]:
    """By torch's own SGD."""

    def outer(anchor: Tensor, average: Tensor, memory: dict[str, Tensor], inner_lr: float) -> Tensor:
        param = torch.nn.Parameter(anchor.clone())
        sgd = torch.optim.SGD([param], lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0)
        if "momentum" in memory:
            sgd.state[param]["momentum_buffer"] = memory["momentum"]
        param.grad = anchor - average
        sgd.step()
        if momentum:
            memory["momentum"] = sgd.state[param]["momentum_buffer"]
        return param.detach()

    return outer


def slowmo_outer(lr: float, momentum: float) -> Callable[..., Tensor]:
    """Algorithm 1 of 1910.00643."""

    def outer(anchor: Tensor, average: Tensor, memory: dict[str, Tensor], inner_lr: float) -> Tensor:
        slow = momentum * memory.get("u", torch.zeros_like(anchor)) + (anchor - average) / inner_lr
        memory["u"] = slow
        return anchor - lr * inner_lr * slow

    return outer


PLANS = plans("data2", "data2_1d", "data2_pipeline2")
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], float | None, dict[str, Any]]] = {
    "local_sgd": (dict(type="local_sgd", period=3), ADAMW, 0.5, dict(period=3)),
    "local_sgd, SGD": (dict(type="local_sgd", period=2), SGD, 0.5, dict(period=2)),
    "slowmo": (
        dict(type="slowmo", period=3, slow_lr=0.9, slow_momentum=0.7),
        SGD,
        None,
        dict(period=3, outer=slowmo_outer(0.9, 0.7)),
    ),
    "diloco": (dict(type="diloco", period=3), ADAMW, 1.0, dict(period=3, outer=diloco_outer(0.7, 0.9))),
    "diloco heavy ball": (
        dict(type="diloco", period=2, outer_lr=0.4, outer_momentum=0.5, nesterov=False),
        SGD,
        None,
        dict(period=2, outer=diloco_outer(0.4, 0.5, nesterov=False)),
    ),
}
#: of each plan its cases
CASES_OF = {
    "data2": ["local_sgd", "slowmo", "diloco"],
    "data2_1d": ["diloco heavy ball"],
    "data2_pipeline2": ["local_sgd, SGD"],
}


@cache
def recurrence(case: str) -> Rounds:
    _, optimizer, clip, how = CASES[case]
    return Rounds(2, optimizer, clip=clip, **how)


@pytest.mark.parametrize("plan", but(("data2_1d", "data2_pipeline2"), PLANS))
def test_rounds_are_those_of_plain_torch(plan: str) -> None:
    world, parallel = PLANS[plan]
    configs = {name: settings(CASES[name][0], parallel, *CASES[name][1:3]) for name in CASES_OF[plan]}
    for name, traces in run_cases(world, configs, STEPS).items():
        wanted = recurrence(name)
        for rank, trace in enumerate(traces):
            replica = rank % 2 if plan == "data2_pipeline2" else rank // (world // 2)
            assert_is_replica(trace, wanted.replicas[replica])
            # the last step is one after which all meet
            assert trace.losses[-1] == pytest.approx(wanted.losses[-1], rel=1e-10)


def _stopped(rank: int, requests: list[tuple[str, int, int]]) -> list[int]:
    """Of each (strategy, replica, step): the step after which this rank stops, where one replica requests one."""
    found = []
    for kind, replica, step in requests:
        config = settings(dict(type=kind, period=4), dict(data=2), PLAIN_SGD)
        engine = colossus.initialize({**config, "train": {**config["train"], "steps": 60}})
        result = None
        while result is None or not (result.stop_requested or result.step == 60):
            if rank == replica and engine.completed_steps == step:
                engine.request_stop()
            result = engine.train_step(share_of(engine.completed_steps % STEPS, rank, 2, BATCH))
        found.append(result.step)
        engine.close()
    return found


def _looked_at(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A replica's own weights in the midst of a round, and those that are evaluated."""
    engine = colossus.initialize(settings(dict(type="local_sgd", period=4), dict(data=2), PLAIN_SGD))
    for step in range(3):
        engine.train_step(_uneven_part(step, rank))
    own, inside = ({}, {})
    for into in (own, inside):
        with engine.strategy.evaluation() if into is inside else nullcontext():
            into.update({name: param.detach().clone() for name, param in engine.model.named_parameters()})
    engine.close()
    return own, inside


def _uneven_part(step: int, rank: int) -> dict[str, Tensor]:
    batch = share_of(step, rank, 2, BATCH)
    if rank:
        batch["labels"][1:] = -100
    return batch


def test_what_is_evaluated_is_weighted_by_tokens_as_rounds_are() -> None:
    (one, inside), (other, also) = run_ranks(2, _looked_at, with_context=False)
    mine, theirs = (
        sum(int((_uneven_part(step, rank)["labels"] != -100).sum()) for step in range(3)) for rank in range(2)
    )
    assert mine > 3 * theirs
    for name, value in one.items():
        mean = (mine * value + theirs * other[name]) / (mine + theirs)
        torch.testing.assert_close(inside[name], mean, rtol=0, atol=1e-13)
        assert torch.equal(inside[name], also[name])


def test_all_stop_after_the_same_step() -> None:
    """In the last step of a round, and in the midst of one."""
    requests = [("local_sgd", 1, 1), ("diloco", 0, 5), ("slowmo", 1, 3)]
    ranks = run_ranks(2, _stopped, requests, with_context=False)
    assert ranks[0] == ranks[1]
    assert all(step + 1 <= stopped < 60 for stopped, (_, _, step) in zip(ranks[0], requests, strict=True))
    assert ranks[0][2] == 4
