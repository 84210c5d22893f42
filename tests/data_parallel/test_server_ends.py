"""Servers that end in the midst of a run, and workers that are stopped."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import server_threads
from helpers.long import long
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch import distributed as dist

import colossus
from colossus.launch.rank_failure import kind_of
from colossus.server.calls import ServerGone

server_threads.in_threads()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def loss_fn(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(outputs, batch["labels"], reduction="sum"), len(outputs)


def engine_of(steps: int, timeout_seconds: float = 60.0, **strategy: Any) -> Any:
    return colossus.initialize(
        dict(
            parallel=dict(data=2, strategy=dict(type="server", servers=2, **strategy)),
            train=dict(steps=steps, global_batch_size=8),
            optimizer=dict(type="SGD", lr=0.1),
            comm=dict(timeout_seconds=timeout_seconds),
            device="cpu",
        ),
        model=Net,
        loss_fn=loss_fn,
    )


def batch() -> dict[str, Tensor]:
    return {"inputs": torch.ones(4, 6), "labels": torch.zeros(4, dtype=torch.int64)}


def _server_dies(rank: int, options: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """Of each strategy what this worker is told, and seconds from the end of a server to it."""
    errors = []
    for strategy in options:
        engine = engine_of(1000, **strategy)
        for _ in range(3):
            engine.train_step(batch())
        dist.barrier()  # the other is in its first steps, perhaps
        began = time.monotonic()
        if rank == 0:
            engine.strategy.at_servers._connection._own[1].close()
        try:
            while time.monotonic() - began < 30:
                engine.train_step(batch())
        except ServerGone as error:
            errors.append((str(error), time.monotonic() - began))
            try:
                raise
            except ServerGone:
                engine.close()
        else:
            engine.close()
    return errors


def test_all_workers_hear_in_words_that_a_server_has_ended() -> None:
    options: list[dict[str, Any]] = [
        dict(mode="sync"),
        dict(mode="async"),
    ]
    by_rank = run_ranks(2, _server_dies, options, with_context=False)
    for of_ranks in zip(*by_rank, strict=True):
        # the first rank ends its other server, too, once it has heard: the second may hear of that one first
        assert any(text.startswith("server 1 at ") for text, _ in of_ranks)
        assert all("is gone: " in text and seconds < 10 for text, seconds in of_ranks)
    assert len(by_rank[0]) == len(options)


def _sleeps(rank: int, strategy: dict[str, Any]) -> tuple[str, str, float]:
    """What the first worker is told when the second lives, and does not come; what it is; after how many seconds."""
    engine = engine_of(1000, 3.0, **strategy)
    store = engine.context.store()
    for _ in range(3):
        engine.train_step(batch())
    ending, began = ("", "", 0.0), time.monotonic()
    if rank == 0:
        try:
            while time.monotonic() - began < 10:
                engine.train_step(batch())
        except RuntimeError as error:
            ending = str(error), kind_of(error), time.monotonic() - began
            engine.close()  # does not wait for the other, either
        store.set("told", "")
    else:
        store.wait(["told"], timedelta(seconds=20))
    try:
        raise RuntimeError("as the step of the other")
    except RuntimeError:
        engine.close()
    return ending


@pytest.mark.parametrize(
    "strategy",
    [
        dict(mode="sync"),
        *long(dict(mode="async", max_staleness=1), dict(mode="async", algorithm="easgd", max_staleness=1)),
    ],
    ids=str,
)
def test_a_worker_that_lives_and_does_not_come_is_named_after_the_time_out(strategy: dict[str, Any]) -> None:
    (text, kind, seconds), _ = run_ranks(2, _sleeps, strategy, with_context=False)
    assert text.startswith("timeout: rank 1 did not reach the servers within 3 s (comm.timeout_seconds): server ")
    assert kind == "communication"
    assert 3.0 <= seconds < 6.0


def _stopped(rank: int, options: list[dict[str, Any]]) -> list[int]:
    """The step after which each run has ended, when the second worker has asked for it in its third step."""
    ended = []
    for strategy in options:
        engine = engine_of(1000, **strategy)
        for step in range(1000):
            if rank == 1 and step == 2:
                engine.request_stop()
            time.sleep(0.002 * (2 - rank))
            if engine.train_step(batch()).stop_requested:
                break
        ended.append(engine.completed_steps)
        engine.close()
    return ended


def test_workers_stop_after_the_same_step() -> None:
    options: list[dict[str, Any]] = [
        dict(mode="async", algorithm="downpour", push_every=3),
        dict(mode="sync", algorithm="easgd", push_every=2),
    ]
    first, second = run_ranks(2, _stopped, options, with_context=False)
    assert first == second
    assert all(3 <= step < 900 for step in first)


OWN_LOOP = """
import os, time, torch
from torch import nn
import colossus

class Net(nn.Linear):
    def forward(self, x):
        time.sleep(0.1 * int(os.environ["RANK"]))
        return super().forward(x)

engine = colossus.initialize(
    dict(
        parallel=dict(data=2, strategy=dict(type="server", mode="async")),
        train=dict(steps=1000, global_batch_size=8), optimizer=dict(type="SGD", lr=0.1), device="cpu",
    ),
    model=lambda: Net(6, 3),
    loss_fn=lambda outputs, batch: (outputs.square().sum(), len(outputs)),
)
for _ in range(10):
    engine.train_step({"inputs": torch.ones(4, 6)})
print("done")
"""


@pytest.mark.long
def test_servers_of_an_own_loop_live_until_the_last_rank_has_ended(tmp_path: Path) -> None:
    """Nobody closes the engine, and the rank that has started the servers is the first to end."""
    script = tmp_path / "loop.py"
    script.write_text(OWN_LOOP)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("done") == 2
