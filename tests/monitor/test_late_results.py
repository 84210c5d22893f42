"""The queue of results that hooks read late, with several threads that write at once."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.launched.fake_engine import FakeEngine

from colossus.engine.fit import fit
from colossus.monitor.late_results import LateResults
from colossus.monitor.metrics import Metrics

STEPS = 150


class ThreadedResult(SimpleNamespace):
    """There or not at random; who reads it is interrupted by another thread while it makes a row of it."""

    def __init__(self, engine: ThreadedEngine, fields: dict[str, Any]) -> None:
        super().__init__(**fields)
        self.engine = engine

    def send_to_host(self) -> bool:
        return True

    def wait(self) -> None:
        time.sleep(0.001)

    @property
    def is_there(self) -> bool:
        return self.engine.chance.random() < 0.5

    @property
    def loss(self) -> float:
        time.sleep(self.engine.chance.choice((0.0, 0.002)))
        return float(self.step)


class ThreadedEngine(FakeEngine):
    chance = random.Random(0)

    def train_step(self, batch: object) -> Any:
        fields = vars(super().train_step(batch))
        return ThreadedResult(
            self, {key: x for key, x in fields.items() if key not in ("loss", "send_to_host", "is_there", "wait")}
        )


def test_threads_that_write_at_once_write_each_row_once_in_order(tmp_path: Path) -> None:
    """A row leaves the queue and goes to the file in one piece: else a thread overtakes one that makes a line."""
    path = tmp_path / "metrics.jsonl"
    metrics, over = Metrics(path), threading.Event()

    def flush() -> None:
        while not over.is_set():
            metrics.flush()

    threads = [threading.Thread(target=flush) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        fit(ThreadedEngine(steps=STEPS, validation=False), [metrics])
    finally:
        over.set()
        for thread in threads:
            thread.join()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))


def queue(*results: Any) -> LateResults[str]:
    late: LateResults[str] = LateResults()
    for result in results:
        late.add(SimpleNamespace(send_to_host=lambda: True, **result), "")  # type: ignore[arg-type]
    return late


def test_a_thread_that_waits_for_numbers_holds_up_nobody() -> None:
    """What it waits for is still in the queue: a hard end finds it, should the numbers have come."""
    first, third, waits, seen = threading.Event(), threading.Event(), threading.Event(), []

    def wait() -> None:
        waits.set()
        first.wait(10)

    late = queue(
        dict(step=1, wait=wait, is_there=False),
        dict(step=2, wait=lambda: None, is_there=True),
        dict(step=3, wait=lambda: third.wait(10), is_there=False),
    )
    other = threading.Thread(target=late.take, args=(lambda result, _: seen.append(("other", third.is_set())),))
    other.start()
    assert waits.wait(10)
    began = time.monotonic()
    late.take(lambda result, _: seen.append(("hard end", result.step)), patience=0.0)
    assert (seen, late.last) == ([], "")
    late._coming[0][0].is_there = True  # type: ignore[misc]
    late.take(lambda result, _: seen.append(("hard end", result.step)), patience=0.0)
    assert time.monotonic() - began < 5
    first.set()
    other.join(0.2)
    third.set()
    other.join()
    assert seen == [("hard end", 1), ("hard end", 2), ("other", True)]  # written once its numbers were there
    assert late.last is None


def test_after_a_write_that_raises_the_next_goes_on_behind_it() -> None:
    fields: Any = dict(is_there=True, wait=lambda: None)
    late, seen = queue(dict(step=1, **fields), dict(step=2, **fields)), []

    def write(result: Any, _: str) -> None:
        if result.step == 1:
            raise ValueError("step 1")
        seen.append(result.step)

    with pytest.raises(ValueError, match="step 1"):
        late.take(write)
    late.take(write)
    assert seen == [2]
