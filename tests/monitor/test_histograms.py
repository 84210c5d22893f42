"""Histograms under plans are those that torch makes of the whole tensors."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.training import batch_of, config_of
from torch import Tensor

import colossus
from colossus.engine.fit import Hook, fit
from colossus.monitor.hooks.histograms import Histograms
from colossus.monitor.hooks.tracker import Histogram, TrackedRun, Tracker
from colossus.monitor.metrics import Metrics
from colossus.schedule.executor import StepObserver
from colossus.state.model_state_dict import full_state_dict

BINS = 7
#: the vocabulary (53) does not divide, and is padded; under a pipeline two stages hold the embedding
TWO: dict[str, dict[str, Any]] = {
    "1d": dict(tensor=2),
    "zero3": dict(data=2, zero=3),
    "pipeline": dict(pipeline=2),
    "bf16": dict(data=2, zero=1),
    "sgp": dict(data=2, strategy="sgp"),
}
FOUR: dict[str, dict[str, Any]] = {
    "2d": dict(tensor=dict(mode="2d", size=4)),
    "all": dict(pipeline=2, data=2, zero=2),
    "sequence": dict(tensor=2, sequence=2),
}


class Whole(Hook, StepObserver):
    """Gathers what is counted."""

    def on_train_start(self, engine: Any) -> None:
        self.engine, self.found = engine, dict[str, dict[str, Tensor]]()
        engine.observers.append(self)

    def before_update(self) -> None:
        model, context = self.engine.model, self.engine.context
        for kind in ("weights", "gradients"):
            self.found[kind] = full_state_dict(model, context, gradients=kind == "gradients", aliases=False)


class Spoils(Hook, StepObserver):
    """In the last step two numbers of a gradient on each rank are not finite."""

    def on_train_start(self, engine: Any) -> None:
        self.engine = engine
        engine.observers.append(self)

    def before_update(self) -> None:
        for name, param in self.engine.model.named_parameters() if self.engine.completed_steps else ():
            if "positions" in name and param.grad is not None and param.grad.numel() > 1:
                param.grad.view(-1)[:2] = torch.tensor([float("nan"), float("inf")])


class RecordedNames(Tracker):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[tuple[int, str, str]] = []

    def write_histogram(self, histogram: Histogram) -> None:
        self.names.append((histogram.step, histogram.kind, histogram.name))


class Starts(Tracker):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, bool]] = []

    def start(self, run: TrackedRun) -> None:
        self.found.append((run.step, run.is_resumed))


def compare(plan: dict[str, Any], precision: Any, folder: Path) -> None:
    """Of a rank: two steps, of which the second is counted."""
    config = config_of(plan, 2, precision, schedule=dict(microbatches=2))
    engine = colossus.initialize(config)
    index, size = engine.context.index("data"), 8 // engine.context.size("data")
    batches: list[Any] = [
        {key: value[index * size : (index + 1) * size] for key, value in batch_of(step).items()} for step in range(2)
    ]
    engine.loaders = SimpleNamespace(train=batches, validation=None)  # type: ignore[assignment]
    path, whole, record = folder / "histograms.jsonl", Whole(), RecordedNames()
    histograms = Histograms(every=2, bins=BINS, path=str(path))
    fit(engine, [Metrics(folder / "metrics.jsonl"), record, Spoils(), histograms, whole])
    if engine.context.is_logging_rank:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [(row["step"], row["kind"], row["name"]) for row in rows] == record.names
        assert {row["step"] for row in rows} == {2}
        for kind, tensors in whole.found.items():
            mine = {row["name"]: row for row in rows if row["kind"] == kind}
            assert mine.keys() == tensors.keys()
            for name, tensor in tensors.items():
                tensor = tensor[tensor.isfinite()]
                wanted = torch.histc(tensor if tensor.dtype == torch.float64 else tensor.float(), BINS).tolist()
                assert mine[name]["counts"] == wanted, (kind, name)
                assert sum(wanted) == tensor.numel()
                edges = mine[name]["edges"]
                assert len(edges) == BINS + 1
                if tensor.min() < tensor.max():
                    assert (edges[0], edges[-1]) == (tensor.min().item(), tensor.max().item())
    engine.close()


def test_steps_that_come_again_after_a_restart_have_one_row(tmp_path: Path) -> None:
    """Nothing was saved: the run begins anew in the same folder."""

    def body(rank: int) -> None:
        for is_restart in (False, True):
            engine = colossus.initialize(config_of({}, 2, "fp32"))
            engine.checkpoints.is_restart = is_restart
            engine.loaders = SimpleNamespace(train=[batch_of(0), batch_of(1)], validation=None)  # type: ignore[assignment]
            files = [tmp_path / "metrics.jsonl", tmp_path / "histograms.jsonl"]
            starts = Starts()
            fit(engine, [Metrics(files[0]), starts, Histograms(every=1, bins=BINS, path=str(files[1]))])
            assert starts.found == [(0, is_restart)]
            engine.close()
        for file in files:
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            keys = [(row["step"], row.get("kind"), row.get("name")) for row in rows]
            assert len(keys) == len(set(keys)) > 1

    run_ranks(1, body, with_context=False)


@pytest.mark.parametrize(("world", "plans"), [(2, TWO), pytest.param(4, FOUR, marks=pytest.mark.long)])
def test_each_element_of_the_whole_tensor_is_counted_once(
    world: int, plans: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    def body(rank: int) -> None:
        for name, plan in plans.items():
            try:
                compare(plan, dict(params="bf16") if name == "bf16" else "fp64", tmp_path / name)
            except BaseException as error:
                error.add_note(f"in the plan {name!r}")
                raise

    run_ranks(world, body, with_context=False)
    for name in plans:
        assert (tmp_path / name / "histograms.jsonl").stat().st_size
