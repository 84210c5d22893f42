"""Servers that end in the midst of a run, and workers that are stopped."""

from __future__ import annotations

import time
from typing import Any

import torch
from helpers import server_threads
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus.server.messages import ServerGone

server_threads.in_threads()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def loss_fn(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(outputs, batch["labels"], reduction="sum"), len(outputs)


def engine_of(steps: int, **strategy: Any) -> Any:
    return colossus.initialize(
        dict(
            parallel=dict(data=2, strategy=dict(type="server", servers=2, **strategy)),
            train=dict(steps=steps, global_batch_size=8),
            optimizer=dict(type="SGD", lr=0.1),
            device="cpu",
        ),
        model=Net,
        loss_fn=loss_fn,
    )


def batch() -> dict[str, Tensor]:
    return {"inputs": torch.ones(4, 6), "labels": torch.zeros(4, dtype=torch.int64)}


def _server_dies(rank: int, options: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """Of each strategy what this worker is told, and seconds from the end of a server to it."""
    told = []
    for strategy in options:
        engine = engine_of(1000, **strategy)
        for _ in range(3):
            engine.train_step(batch())
        began = time.monotonic()
        if rank == 0:
            engine.strategy.at_servers._connection._own[1].close()
        try:
            while time.monotonic() - began < 30:
                engine.train_step(batch())
        except ServerGone as error:
            told.append((str(error), time.monotonic() - began))
            try:
                raise
            except ServerGone:
                engine.close()
        else:
            engine.close()
    return told


def test_all_workers_hear_in_words_that_a_server_has_ended() -> None:
    options: list[dict[str, Any]] = [
        dict(mode="sync"),
        dict(mode="async"),
        dict(mode="async", algorithm="easgd", push_every=2),
    ]
    by_rank = run_ranks(2, _server_dies, options, with_context=False)
    for of_ranks in zip(*by_rank, strict=True):
        # the first rank ends its other server, too, once it has heard: the second may hear of that one first
        assert any(text.startswith("server 1 at ") for text, _ in of_ranks)
        assert all("is gone: " in text and seconds < 10 for text, seconds in of_ranks)
    assert len(by_rank[0]) == len(options)


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
        dict(mode="sync"),
        dict(mode="async"),
        dict(mode="async", algorithm="downpour", push_every=3),
        dict(mode="sync", algorithm="easgd", push_every=2),
    ]
    first, second = run_ranks(2, _stopped, options, with_context=False)
    assert first == second
    assert all(3 <= step < 900 for step in first)
