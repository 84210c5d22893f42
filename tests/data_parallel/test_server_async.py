"""Asynchronous SGD, Downpour and elastic averaging at parameter servers."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import server_threads
from helpers.long import long
from helpers.ranks import run_ranks
from helpers.training import Trace, assert_close_states, batch_of, config_of, is_key_bias, run_cases
from torch import Tensor, nn

import colossus
from colossus.data_parallel.servers.async_sgd import Downpour

server_threads.in_threads()

STEPS = 3
SGD: dict[str, Any] = dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=0.01)
ADAMW: dict[str, Any] = dict(type="AdamW", lr=1e-2, weight_decay=0.1)


def settings(strategy: dict[str, Any], optimizer: dict[str, Any], plan: dict[str, Any] | None = None) -> dict[str, Any]:
    return config_of(
        {"data": 1, **(plan or {}), "strategy": strategy},
        STEPS,
        "fp64",
        optimizer=optimizer,
        train=dict(steps=STEPS, clip_grad_norm=0.7),
        lr_schedule=dict(warmup_steps=2),
    )


def server(algorithm: str = "sgd", mode: str = "async", **options: Any) -> dict[str, Any]:
    return dict(type="server", mode=mode, algorithm=algorithm, servers=2, **options)


def test_one_worker_is_one_process() -> None:
    """Asynchronous SGD with the optimizer at the servers, Downpour with its own however often it pushes and pulls."""
    cases = {
        "sgd/wanted": settings(dict(type="all_reduce"), SGD),
        "sgd/bounded": settings(server(max_staleness=0), SGD),
        "sgd/rarely": settings(server("downpour", push_every=2, pull_every=3), SGD),
        "adamw/wanted": settings(dict(type="all_reduce"), ADAMW),
        "adamw/async": settings(server(), ADAMW),
        "adamw/downpour": settings(server("downpour"), ADAMW),
    }
    found = run_cases(1, cases, STEPS)
    for name, (trace,) in found.items():
        wanted = found[f"{name.partition('/')[0]}/wanted"][0]
        torch.testing.assert_close(trace.losses, wanted.losses, rtol=1e-11, atol=1e-12, msg=name)
        torch.testing.assert_close(trace.norms, wanted.norms, rtol=1e-11, atol=1e-12, msg=name)
        assert_close_states(without_key_bias(trace), without_key_bias(wanted), name, atol=1e-11)


def without_key_bias(trace: Trace) -> dict[str, Tensor]:
    return {name: value for name, value in trace.end.items() if not is_key_bias(name)}


# -- a model of a few numbers ---------------------------------------------------------------------------------


class Numbers(nn.Module):
    """Its gradient is what the batch says, or 0."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(5, 2))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.x * gradient).sum((1, 2))


def loss_fn(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return outputs.sum(), len(outputs)


def engine_of(strategy: dict[str, Any], data: int, steps: int, **optimizer: Any) -> Any:
    return colossus.initialize(
        dict(
            parallel=dict(data=data, strategy=strategy),
            train=dict(steps=steps, global_batch_size=data, precision="fp64"),
            optimizer=optimizer or dict(type="SGD", lr=1.0),
            device="cpu",
        ),
        model=Numbers,
        loss_fn=loss_fn,
    )


def gradient_of(value: float) -> dict[str, Tensor]:
    return {"inputs": torch.full((1, 5, 2), value, dtype=torch.float64), "labels": torch.zeros(1)}


def _elastic(rank: int) -> list[tuple[float, float]]:
    """After each exchange x of this worker and the anchor."""
    engine = engine_of(server("easgd", "sync"), 4, 4)
    engine.strategy.at_servers.place()
    engine.model.x.data.fill_(rank + 1.0)
    seen = []
    for _ in range(4):
        engine.train_step(gradient_of(0.0))
        x = engine.model.x[0, 0].item()
        with engine.strategy.evaluation():
            seen.append((x, engine.model.x[0, 0].item()))
            # the rows are on two servers, which add in orders of their own
            assert engine.model.x.max() - engine.model.x.min() < 1e-14
        assert engine.model.x[0, 0].item() == x
    engine.close()
    return seen


def test_the_elastic_force_of_all_is_from_the_same_anchor() -> None:
    """x = 1..4, anchor 0, alpha 0.9 / 4: the sum stays 10, the gap of anchor and mean is multiplied by -1/8."""
    found = run_ranks(4, _elastic, with_context=False)
    gaps = []
    for number in range(4):
        (anchor,) = {seen[number][1] for seen in found}
        xs = [seen[number][0] for seen in found]
        assert sum(xs) + anchor == pytest.approx(10.0, abs=1e-12)
        gaps.append(anchor - sum(xs) / 4)
    assert gaps == pytest.approx([0.3125, -0.0390625, 0.0048828125, -0.0006103515625], abs=1e-12)


def _downpour(rank: int, options: dict[str, Any], steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """All updates that this worker has made, what the servers have in the end, and what it has itself."""
    made = torch.zeros(5, 2, dtype=torch.float64)

    class Recording(Downpour):
        def update(self, optimizer: torch.optim.Optimizer) -> None:
            before = self.trained[0].detach().clone()
            super().update(optimizer)
            made.add_(self.trained[0].detach() - before)

    pauses = random.Random(rank)
    engine = engine_of(server("downpour", **options), 3, steps, type="SGD", lr=0.1, momentum=0.5)
    engine.strategy.__class__ = Recording
    for step in range(steps):
        engine.train_step(gradient_of(rank + step / 8))
        time.sleep(pauses.uniform(0, 0.01))
    own = engine.model.x.detach().clone()
    with engine.strategy.export():
        at_servers = engine.model.x.detach().clone()
    engine.close()
    return made, at_servers, own


@pytest.mark.parametrize(
    "options",
    [
        dict(push_every=3, pull_every=2),
        *long(dict(prefetch=False, push_every=2, max_staleness=2), dict(pull_every=4)),
    ],
    ids=lambda options: ",".join(f"{key}={value}" for key, value in options.items()) or "default",
)
def test_every_update_of_downpour_is_added_once(options: dict[str, Any]) -> None:
    found = run_ranks(3, _downpour, options, 17, with_context=False)
    total = sum(made for made, _, _ in found)
    for _, at_servers, _ in found:
        torch.testing.assert_close(at_servers, total, rtol=0, atol=1e-12)


def _wait_for_others(folder: Path) -> None:
    """Until the second and the third worker have each made their file."""
    deadline = time.monotonic() + 30
    while not all((folder / name).exists() for name in ("1", "2")):
        assert time.monotonic() < deadline, "the others wait for this worker"
        time.sleep(0.001)


def _times(rank: int, folder: Path, bound: int, steps: int) -> tuple[list[float], list[float]]:
    """When this worker has begun its steps with what it then has, and when it had finished them.

    The first one begins its third step when the others are as far ahead of it as ``bound`` lets them.
    """
    engine = engine_of(server(max_staleness=bound, prefetch=False), 3, steps, type="SGD", lr=0.1)
    strategy = engine.strategy
    begin, begins, ends = strategy.begin_step, [], []

    def begin_step(step: int) -> None:
        begin(step)
        begins.append(time.monotonic())
        if step == 2 + bound:
            (folder / str(rank)).touch()

    strategy.begin_step = begin_step
    for step in range(steps):
        if rank == 0 and step == 2:
            _wait_for_others(folder)
        time.sleep(0.01 if rank == 0 else 0.0)
        engine.train_step(gradient_of(1.0))
        ends.append(time.monotonic())
    engine.close()
    return begins, ends


def _slow(rank: int, folder: Path, steps: int) -> tuple[float, list[dict[str, float]]]:
    """The first worker is in its second step until the others have come to their last, which is a sync point."""
    engine = engine_of(server(), 3, steps, type="SGD", lr=0.1)
    reports = []
    for step in range(steps):
        if rank == 0 and step == 1:
            engine.model.register_forward_pre_hook(lambda *_: _wait_for_others(folder))
        if step == steps - 1:
            (folder / str(rank)).touch()
        engine.train_step(gradient_of(1.0))
        reports.append(engine.strategy.report())
    with engine.strategy.export():
        x = engine.model.x[0, 0].item()
    engine.close()
    return x, reports


def test_a_slow_worker_slows_nobody_and_every_push_counts(tmp_path: Path) -> None:
    steps = 20
    found = run_ranks(3, _slow, tmp_path, steps, with_context=False)
    for x, reports in found:
        assert x == pytest.approx(-0.1 * steps * 3, abs=1e-12)
        assert all(report["push_bytes"] == 80 for report in reports)
    # it pulled while the others had made some steps at most, and pushed when they had made all but one
    assert max(report.get("staleness_max", 0) for report in found[0][1]) > steps


@pytest.mark.parametrize("bound", [2, *long(0)])
def test_no_worker_is_further_ahead_than_the_bound(bound: int, tmp_path: Path) -> None:
    found = run_ranks(3, _times, tmp_path, bound, 12, with_context=False)
    ahead = []
    for begins, _ in found:
        for step, began in enumerate(begins):
            least = min(sum(end < began for end in ends) for _, ends in found)
            assert step - least <= bound + 1  # of which one may have pushed, and not returned from its step yet
            ahead.append(step - least)
    assert max(ahead) >= bound


# -- several ranks in a replica ----------------------------------------------------------------------------------


def _product(rank: int, plans: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of each plan the losses, and all parameters by name: as this rank steps with them, and as they are evaluated."""
    found = {}
    for name, config in plans.items():
        engine = colossus.initialize(config)
        index = engine.context.index("data")
        result, held = None, []
        for step in range(STEPS):
            batch = {key: value[index * 4 : index * 4 + 4] for key, value in batch_of(step).items()}
            result = engine.train_step(batch)
            held.append({each: param.detach().clone() for each, param in engine.model.named_parameters()})
        with engine.strategy.evaluation():
            evaluated = {each: param.detach().clone() for each, param in engine.model.named_parameters()}
        assert result is not None
        found[name] = index, engine.context.index("pipeline"), result.loss, held, evaluated
        engine.close()
    return found


@pytest.mark.parametrize(
    "names", [("1d/sgd", "pipeline/easgd"), *long(("1d/easgd", "1d/downpour", "pipeline/sgd"))], ids=["some", "rest"]
)
def test_a_replica_of_several_ranks_has_one_version_of_what_they_share(names: tuple[str, ...]) -> None:
    plans: dict[str, dict[str, Any]] = {"1d": dict(tensor=dict(mode="1d", size=2)), "pipeline": dict(pipeline=2)}
    configs = {}
    for name in names:
        plan, _, algorithm = name.partition("/")
        options = dict(push_every=2) if algorithm == "downpour" else {}
        configs[name] = settings(server(algorithm, **options), ADAMW, {"data": 2, **plans[plan]})
    found = run_ranks(4, _product, configs, with_context=False)
    for name in configs:
        by_replica: dict[int, list[Any]] = {}
        for each in found:
            by_replica.setdefault(each[name][0], []).append(each[name])
        for first, second in by_replica.values():
            assert first[2] == second[2]  # the loss of a replica
            if name.startswith("1d"):
                for ours, theirs in zip(first[3], second[3], strict=True):
                    for key in (key for key in ours if "norm" in key):
                        assert torch.equal(ours[key], theirs[key]), (name, key)
        for here, there in zip(*by_replica.values(), strict=True):
            for key, value in here[4].items():
                assert torch.equal(value, there[4][key]), f"{name}: {key} is evaluated differently by replicas"
                assert value.isfinite().all()
