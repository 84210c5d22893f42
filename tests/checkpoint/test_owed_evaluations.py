"""Evaluations that a stop has left out, or ended: the run that goes on makes them up, and nobody sees a difference."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import run_ranks
from helpers.small_run import Net, Numbers

import colossus
from colossus.engine.fit import Hook, fit
from colossus.engine.results import EvalResult
from colossus.monitor.hooks.best_checkpoint import BestCheckpoint
from colossus.monitor.hooks.csv_file import CSV
from colossus.monitor.metrics import Metrics

STEPS = 6
#: of a row, what depends on the run and not on the machine
NUMBERS = ("step", "loss", "grad_norm", "lr", "tokens", "validation_loss")
#: where a stop is asked for, one attempt after the other: before the step of that number, or behind it
STOPS: dict[str, list[tuple[str, int]]] = {
    "undisturbed": [],
    "at an evaluation": [("before", 2)],
    "in an evaluation": [("behind", 4)],
    "at the last": [("before", 6)],
    "twice at one": [("before", 4), ("start", 4)],
    "again and again": [("before", 2), ("before", 3), ("behind", 4), ("start", 4), ("behind", 6)],
}


class Heard(Hook):
    """Counts evaluations, as a hook does whose count is saved, and asks for a stop."""

    def __init__(self, stop: tuple[str, int] | None) -> None:
        self.stop = stop
        self.evaluated: list[int] = []

    def on_train_start(self, engine: Any) -> None:
        self._stop_if(engine, "start", engine.completed_steps)

    def on_step_start(self, engine: Any) -> None:
        self._stop_if(engine, "before", engine.completed_steps + 1)

    def on_step_end(self, engine: Any, result: Any) -> None:
        self._stop_if(engine, "behind", result.step)

    def on_eval_end(self, engine: Any, summary: EvalResult) -> None:
        self.evaluated.append(summary.step)

    def state_dict(self) -> dict[str, Any]:
        return {"evaluated": self.evaluated}

    def load_state_dict(self, state: Any) -> None:
        self.evaluated = state["evaluated"]

    def _stop_if(self, engine: Any, when: str, step: int) -> None:
        if (when, step) == self.stop and engine.context.rank == 1:
            engine.request_stop()


def attempts(rank: int, folder: Path, stops: list[tuple[str, int]]) -> tuple[list[tuple[int, str]], list[int]]:
    """Return how each attempt has ended, and the evaluations that a hook behind one that saves has heard of; the last
    attempt, which has nothing left to do, knows them from the checkpoint."""
    ends = []
    for stop in [*stops, None, None]:
        engine = colossus.initialize(
            dict(
                parallel=dict(data=2),
                model=dict(type=Net),
                data=dict(type=Numbers),
                train=dict(steps=STEPS, global_batch_size=8, eval_every=2, eval_batches=2),
                checkpoint=dict(every=10, resume="auto"),
                device="cpu",
            )
        )
        engine.run.folder = folder
        heard = Heard(stop)
        summary = fit(engine, [Metrics(folder / "metrics.jsonl"), CSV(), BestCheckpoint(keep=9), heard])
        engine.close()
        ends.append((summary.steps, summary.reason))
    return ends, heard.evaluated


def all_cases(rank: int, folder: Path, cases: list[str]) -> dict[str, Any]:
    return {name: attempts(rank, folder / name, STOPS[name]) for name in cases}


def seen(folder: Path) -> tuple[list[Any], list[Any], list[str], list[str]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with (folder / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    for line, row in zip(table, rows, strict=True):
        assert line["validation_loss"] == str(row.get("validation_loss", ""))
        assert float(line["time"]) == row["time"]
    numbers = [{key: row[key] for key in NUMBERS if key in row} for row in rows]
    columns = [{key: line[key] for key in NUMBERS} for line in table]
    best = (folder / "checkpoints" / "best").read_text().split()
    return numbers, columns, best, sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("cases", [["undisturbed", "again and again"], pytest.param([*STOPS], marks=pytest.mark.long)])
def test_an_evaluation_that_a_stop_leaves_out_is_made_up(cases: list[str], in_memory: Path) -> None:
    (ended, *others) = run_ranks(2, all_cases, in_memory, cases, with_context=False)
    assert others == [ended]
    expected = seen(in_memory / "undisturbed")
    assert ["validation_loss" in row for row in expected[0]] == [False, True] * 3
    for name in cases:
        ends, evaluated = ended[name]
        assert ends == [*((step, "stopped") for _, step in STOPS[name]), *[(STEPS, "finished")] * 2], name
        assert evaluated == [2, 4, 6], name
        numbers, columns, best, saved = seen(in_memory / name)
        assert (numbers, columns, best) == expected[:3], name
        assert set(expected[3]) <= set(saved), name
