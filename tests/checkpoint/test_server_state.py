"""Parameters at servers in checkpoints: what goes on from them, under which strategy and how many servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import server_threads
from helpers.long import long
from helpers.ranks import run_ranks
from helpers.resumed import engine_of, settings
from torch import Tensor, nn

from colossus.checkpoint.folder import name_of
from colossus.checkpoint.reader import CheckpointReader

server_threads.in_threads()

STEPS, HALF = 6, 3
ALL_REDUCE: dict[str, Any] = dict(type="all_reduce")
ADAMW: dict[str, Any] = dict(type="AdamW", lr=0.01, weight_decay=0.1)
MOMENTUM: dict[str, Any] = dict(type="SGD", lr=0.05, momentum=0.9)


def server(servers: int = 2, mode: str = "sync", **options: Any) -> dict[str, Any]:
    return dict(type="server", servers=servers, mode=mode, **options)


def elastic(servers: int = 2) -> dict[str, Any]:
    return server(servers, algorithm="easgd", push_every=2)


#: by number of ranks (those that take long under a negative one): the plan, and who saves and who goes on
CASES: dict[int, dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]]] = {
    1: {
        "async": (dict(data=1), ADAMW, server(mode="async"), server(3, mode="async")),
        "downpour": (
            dict(data=1),
            MOMENTUM,
            server(mode="async", algorithm="downpour", push_every=2),
            server(3, mode="async", algorithm="downpour", push_every=2),
        ),
    },
    2: {
        "sync to all_reduce": (dict(data=2), ADAMW, server(2), ALL_REDUCE),
        "elastic": (dict(data=2), ADAMW, elastic(2), elastic(3)),
    },
    -2: {
        "sync": (dict(data=2), ADAMW, server(2), server(3)),
        "all_reduce to sync": (dict(data=2), MOMENTUM, ALL_REDUCE, server(2)),
        "1d": (dict(tensor=2), ADAMW, server(2), ALL_REDUCE),
        "1d, async": (dict(tensor=2), MOMENTUM, server(2, mode="async"), ALL_REDUCE),
    },
}


def _through_and_in_two(rank: int, cases: int, folder: Path) -> dict[str, tuple[Any, Any]]:
    """Of each case, what a run through and one that goes on in a new engine have seen and end with."""
    found = {}
    for name, (parallel, optimizer, first, second) in CASES[cases].items():
        made = [
            settings(
                folder / name,
                {**parallel, "strategy": strategy},
                optimizer=optimizer,
                train=dict(steps=STEPS, precision="fp64"),
            )
            for strategy in (first, second)
        ]
        engine = engine_of(made[0])
        engine.loss_fn = _uneven
        losses = []
        for step in range(STEPS):
            if step == HALF:
                engine.checkpoints.save().wait()
            losses.append(engine.train_step(next(engine.loader)).loss)
        through = losses[HALF:], _weights(engine)
        engine.close()
        engine = engine_of(made[1])
        engine.loss_fn = _uneven
        engine.checkpoints.load(folder / name / name_of(HALF))
        losses = [engine.train_step(next(engine.loader)).loss for _ in range(HALF, STEPS)]
        found[name] = through, (losses, _weights(engine))
        engine.close()
    return found


def _uneven(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    counted = batch["labels"] > 1
    return (nn.functional.cross_entropy(outputs, batch["labels"], reduction="none") * counted).sum(), counted.sum()


def _weights(engine: Any) -> Tensor:
    return torch.cat([param.detach().flatten() for param in engine.model.parameters()])


@pytest.mark.parametrize("cases", [1, 2, *long(-2)])
def test_a_run_goes_on_with_other_servers_and_with_all_reduce(cases: int, tmp_path: Path) -> None:
    for found in run_ranks(abs(cases), _through_and_in_two, cases, tmp_path, with_context=False):
        for name, ((losses, weights), (again, weights_again)) in found.items():
            torch.testing.assert_close(losses, again, rtol=1e-11, atol=1e-12, msg=name)
            torch.testing.assert_close(weights, weights_again, rtol=0, atol=1e-12, msg=name)
    if cases == 2:
        manifest = CheckpointReader(tmp_path / "sync to all_reduce" / name_of(HALF)).manifest
        assert {name.rpartition("/")[2] for name in manifest.names("optimizer")} >= {"exp_avg", "exp_avg_sq"}


def _asynchronous(rank: int, folder: Path) -> tuple[Tensor, Tensor, list[float]]:
    """Two workers of their own pace save: what was evaluated, and with what all_reduce goes on."""
    plan = dict(data=2, strategy=server(mode="async"))
    engine = engine_of(settings(folder, plan, optimizer=ADAMW, train=dict(steps=STEPS, precision="fp64")))
    engine.loss_fn = _uneven
    for _ in range(HALF):
        engine.train_step(next(engine.loader))
    engine.checkpoints.save().wait()
    with engine.strategy.evaluation():
        evaluated = _weights(engine)
    engine.close()
    engine = engine_of(settings(folder, dict(data=2), optimizer=ADAMW, train=dict(steps=STEPS, precision="fp64")))
    engine.checkpoints.load(folder / name_of(HALF))
    loaded = _weights(engine)
    steps = [float(state["step"]) for state in engine.optimizer.state.values()]
    engine.close()
    return evaluated, loaded, steps


def test_all_reduce_goes_on_from_asynchronous_workers(tmp_path: Path) -> None:
    for evaluated, loaded, steps in run_ranks(2, _asynchronous, tmp_path, with_context=False):
        assert torch.equal(evaluated, loaded)
        assert set(steps) == {2.0 * HALF}  # each push was an update
