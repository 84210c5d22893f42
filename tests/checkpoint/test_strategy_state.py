"""Strategies that average in rounds, compress sums or keep parameters at servers, stopped in the midst: they go on bit
for bit; from servers under other numbers of them, and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import server_threads
from helpers.long import long
from helpers.ranks import run_ranks
from helpers.resumed import engine_of, settings, uneven
from torch import Tensor

from colossus.checkpoint.folder import name_of
from colossus.checkpoint.manifest import read_manifest
from colossus.layout.split_parameter import as_shards

server_threads.in_threads()

STEPS, HALF = 6, 3
Options = dict[str, Any]
POWER: Options = dict(compress="powersgd", start_step=1, min_compression_rate=0.0)
ALL_REDUCE: Options = dict(type="all_reduce")
ADAMW: Options = dict(type="AdamW", lr=0.01, weight_decay=0.1)
MOMENTUM: Options = dict(type="SGD", lr=0.05, momentum=0.9)
#: by number of ranks: plan, strategy
STRATEGIES: dict[int, dict[str, tuple[Options, Options]]] = {
    2: {
        "bf16": (dict(data=2), dict(type="all_reduce", compress="bf16")),
        "powersgd": (dict(data=2), dict(type="all_reduce", **POWER)),
    },
    4: {
        "diloco": (dict(data=2, tensor=2), dict(type="diloco", period=2)),
        "powersgd": (dict(data=2, tensor=2), dict(type="all_reduce", **POWER)),
        "bf16 between hosts": (dict(data=4), dict(type="hierarchical", compress="bf16", hosts=2)),
        "powersgd between hosts": (dict(data=4), dict(type="hierarchical", per_host=2, **POWER)),
    },
}


def server(servers: int = 2, mode: str = "sync", **options: Any) -> Options:
    return dict(type="server", servers=servers, mode=mode, **options)


DOWNPOUR: Options = dict(mode="async", algorithm="downpour", push_every=2)
EASGD: Options = dict(algorithm="easgd", push_every=2)
#: by number of ranks: the plan, and who saves and who goes on
SERVERS: dict[int, dict[str, tuple[Options, Options, Options, Options]]] = {
    1: {
        "async": (dict(data=1), ADAMW, server(mode="async"), server(3, mode="async")),
        "downpour": (dict(data=1), MOMENTUM, server(**DOWNPOUR), server(3, **DOWNPOUR)),
    },
    2: {
        "sync to all_reduce": (dict(data=2), ADAMW, server(2), ALL_REDUCE),
        "elastic": (dict(data=2), ADAMW, server(**EASGD), server(3, **EASGD)),
    },
}


def _through_and_in_two(folder: Path, first: Options, second: Options) -> tuple[Any, Any]:
    """What a run through and one that goes on in a new engine have seen and end with."""
    engine = engine_of(first)
    engine._stages.loss_fn = uneven
    losses = []
    for step in range(STEPS):
        if step == HALF:
            engine.checkpoints.save().wait()
        losses.append(engine.train_step(next(engine.loader)).loss)
    through = losses[HALF:], _weights(engine)
    engine.close()
    engine = engine_of(second)
    engine._stages.loss_fn = uneven
    engine.checkpoints.load(folder / name_of(HALF))
    losses = [engine.train_step(next(engine.loader)).loss for _ in range(HALF, STEPS)]
    again = losses, _weights(engine)
    engine.close()
    return through, again


def _weights(engine: Any) -> Tensor:
    with as_shards():
        return torch.cat([param.detach().flatten() for param in engine.model.parameters()])


def _goes_on(rank: int, world: int, folder: Path) -> dict[str, tuple[Any, Any]]:
    found = {}
    for name, (parallel, strategy) in STRATEGIES[world].items():
        config = settings(folder / name, {**parallel, "strategy": strategy}, train=dict(steps=STEPS))
        found[name] = _through_and_in_two(folder / name, config, config)
    return found


@pytest.mark.parametrize("world", [2, *long(4)])
def test_a_run_goes_on_bit_for_bit(world: int, tmp_path: Path) -> None:
    for found in run_ranks(world, _goes_on, world, tmp_path, with_context=False):
        assert len(found) == len(STRATEGIES[world])
        for name, ((losses, weights), (again, weights_again)) in found.items():
            assert losses == again, name
            assert torch.equal(weights, weights_again), name


def _goes_on_elsewhere(rank: int, cases: int, folder: Path) -> dict[str, tuple[Any, Any]]:
    found = {}
    for name, (parallel, optimizer, *strategies) in SERVERS[cases].items():
        first, second = (
            settings(folder / name, {**parallel, "strategy": each}, optimizer=optimizer, train=dict(steps=STEPS))
            for each in strategies
        )
        found[name] = _through_and_in_two(folder / name, first, second)
    return found


@pytest.mark.parametrize("cases", [1, 2])
@pytest.mark.rest("2")
def test_a_run_goes_on_with_other_servers_and_with_all_reduce(cases: int, tmp_path: Path) -> None:
    for found in run_ranks(cases, _goes_on_elsewhere, cases, tmp_path, with_context=False):
        for name, ((losses, weights), (again, weights_again)) in found.items():
            torch.testing.assert_close(losses, again, rtol=1e-11, atol=1e-12, msg=name)
            torch.testing.assert_close(weights, weights_again, rtol=0, atol=1e-12, msg=name)
    if cases == 2:
        manifest = read_manifest(tmp_path / "sync to all_reduce" / name_of(HALF))
        assert {name.rpartition("/")[2] for name in manifest.names("optimizer")} >= {"exp_avg", "exp_avg_sq"}


def _asynchronous(rank: int, folder: Path) -> tuple[Tensor, Tensor, list[float]]:
    """Two workers of their own pace save: what was evaluated, and with what all_reduce goes on."""
    plan = dict(data=2, strategy=server(mode="async"))
    engine = engine_of(settings(folder, plan, optimizer=ADAMW, train=dict(steps=STEPS)))
    for _ in range(HALF):
        engine.train_step(next(engine.loader))
    engine.checkpoints.save().wait()
    with engine.strategy.evaluation():
        evaluated = _weights(engine)
    engine.close()
    engine = engine_of(settings(folder, dict(data=2), optimizer=ADAMW, train=dict(steps=STEPS)))
    engine.checkpoints.load(folder / name_of(HALF))
    loaded = _weights(engine)
    steps = [float(state["step"]) for state in engine.optimizer.state.values()]
    engine.close()
    return evaluated, loaded, steps


NOBODY_WAITS: dict[str, Options] = {
    "ad-psgd": dict(type="ad-psgd", graph="ring"),
    "async": server(mode="async"),
    "downpour": server(**DOWNPOUR),
    "elastic": server(**EASGD),
}

Kept = dict[str, tuple[Tensor, dict[str, Tensor]]]


def _begins_and_saves(rank: int, num_replicas: int, begin: int, folder: Path) -> tuple[Kept, Kept]:
    """What replicas begin with, of the save of step ``begin``, and what those have that they save a step later."""
    begun, saved = {}, {}
    for name, strategy in NOBODY_WAITS.items():
        plan = dict(data=num_replicas, strategy=strategy)
        engine = engine_of(settings(folder / name, plan, optimizer=ADAMW, train=dict(steps=STEPS)))
        if begin:
            engine.checkpoints.load(folder / name / name_of(begin))
            assert engine.completed_steps == begin
            begun[name] = _weights(engine), _optimizer(engine)
        engine.train_step(next(engine.loader))
        with engine.strategy.evaluation():
            evaluated = _weights(engine)
        engine.checkpoints.save().wait()
        saved[name] = evaluated, _optimizer(engine)
        engine.close()
    return begun, saved


def _optimizer(engine: Any) -> dict[str, Tensor]:
    names = {param: name for name, param in engine.model.named_parameters()}
    kept = engine.strategy.optimizer_state(engine.optimizer).items()
    found = {f"{names[param]}.{entry}": value for param, of_param in kept for entry, value in of_param.items()}
    return {key: torch.as_tensor(value).clone() for key, value in found.items()}


def test_another_number_of_replicas_that_do_not_wait_begins_with_their_average(tmp_path: Path) -> None:
    (_, saved), *_ = run_ranks(2, _begins_and_saves, 2, 0, tmp_path, with_context=False)
    for begin, num_replicas in ((1, 4), (2, 2)):
        ranks = run_ranks(num_replicas, _begins_and_saves, num_replicas, begin, tmp_path, with_context=False)
        for begun, _ in ranks:
            for name, (weights, optimizer) in begun.items():
                assert torch.equal(weights, saved[name][0]), name
                assert optimizer.keys() == saved[name][1].keys() != set()
                for key, value in saved[name][1].items():
                    torch.testing.assert_close(optimizer[key], value, rtol=0, atol=0, check_dtype=False, msg=key)
        saved = ranks[0][1]


def test_all_reduce_goes_on_from_asynchronous_workers(tmp_path: Path) -> None:
    for evaluated, loaded, steps in run_ranks(2, _asynchronous, tmp_path, with_context=False):
        assert torch.equal(evaluated, loaded)
        assert set(steps) == {2.0 * HALF}  # each push was an update
