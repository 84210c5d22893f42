"""Trackers of other packages, without a network: what they have taken of a run, and that it goes on in the same run.

The packages are large, so the suite does not install them: pip install wandb mlflow tensorboard.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.launched.fake_engine import FakeEngine

from colossus.engine.fit import Hook, fit
from colossus.monitor.hooks.mlflow_run import MLflow
from colossus.monitor.hooks.tensorboard import TensorBoard
from colossus.monitor.hooks.tracker import Histogram, Tracker
from colossus.monitor.hooks.wandb_run import WandB
from colossus.monitor.metrics import Metrics


class Counts(Hook):
    """Gives the others a histogram after step 2."""

    def on_step_end(self, engine: Any, result: Any) -> None:
        for hook in engine.checkpoints.hooks if result.step == 2 else ():
            if isinstance(hook, Tracker):
                hook.add_histogram(Histogram(2, "weights", "layer.weight", [-1.0, 0.0, 1.0], [3, 4]))


def run_twice(folder: Path, make: Any) -> tuple[Any, Any]:
    """The hook of a run of four steps, of which a checkpoint after the third is saved, and that of one that goes on."""
    folder.mkdir()
    hooks = []
    for begin, steps in ((0, 4), (3, 6)):
        engine, hook = FakeEngine(steps=steps, eval_every=2), make()
        engine.completed_steps, engine.run.folder = begin, folder
        if begin:
            hook.load_state_dict(hooks[0].state_dict() or {"run_id": None})
            engine.checkpoints.resumed_from, engine.checkpoints.is_same_run = folder / "step-00000003", True
        engine.checkpoints.on_save_after = {3}
        fit(engine, [Metrics(folder / "metrics.jsonl"), hook, Counts()])
        hooks.append(hook)
    return hooks[0], hooks[1]


def losses(steps: Any) -> list[float]:
    return [10.0 - step + 1 / 3 for step in steps]


def records_of(path: Path) -> Iterator[bytes]:
    """Of a file of wandb: the log format of LevelDB, blocks of 32 KiB with records of (checksum, length, type)."""
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record, at = record + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    first, second = run_twice(tmp_path / "run", lambda: WandB(mode="offline", group="mine"))
    assert first.run_id == second.run_id
    assert "colossus:" not in capfd.readouterr().err
    rows: list[dict[str, Any]] = []
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert [path.name for path in files] == [f"run-{first.run_id}.wandb"] * 2
    for path in files:
        for data in records_of(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                run = record.run
                assert (run.project, run.display_name, run.run_group) == ("run", "run", "mine")
                config = {item.key: json.loads(item.value_json) for item in run.config.update}
                assert config["train"]["global_batch_size"] == 1
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    trained = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in trained] == [1, 2, 3, 4, 4, 5, 6]
    assert [row["train/loss"] for row in trained] == losses([1, 2, 3, 4, 4, 5, 6])
    assert [row.get("validation/loss") for row in trained] == [None, 18.0, None, 16.0, 16.0, None, 14.0]
    name = "weights/layer.weight"
    assert [(row[f"{name}/bins"], row[f"{name}/values"]) for row in rows if f"{name}/_type" in row] == [
        ([-1, 0, 1], [3, 4])
    ]


def test_mlflow_in_a_database(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    pytest.importorskip("sqlalchemy")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    first, second = run_twice(tmp_path / "run", lambda: MLflow(experiment="mine", tracking_uri=uri))
    assert first.run_id == second.run_id
    assert "colossus:" not in capfd.readouterr().err
    client = tracking.MlflowClient(uri)
    run = client.get_run(first.run_id)
    assert client.get_experiment(run.info.experiment_id).name == "mine"
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["train.global_batch_size"] == "1"
    of_loss = sorted((each.step, each.value) for each in client.get_metric_history(first.run_id, "train/loss"))
    assert of_loss == list(zip([1, 2, 3, 4, 4, 5, 6], losses([1, 2, 3, 4, 4, 5, 6]), strict=True))
    validated = client.get_metric_history(first.run_id, "validation/loss")
    assert {(each.step, each.value) for each in validated} == {(2, 18.0), (4, 16.0), (6, 14.0)}


def test_tensorboard_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_twice(tmp_path / "run", TensorBoard)
    assert "colossus:" not in capfd.readouterr().err
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("train/loss")
    assert [each.step for each in scalars] == [1, 2, 3, 4, 5, 6]
    assert [each.value for each in scalars] == pytest.approx(losses(range(1, 7)))
    assert [(each.step, each.value) for each in events.Scalars("validation/loss")] == [(2, 18.0), (4, 16.0), (6, 14.0)]
    (drawn,) = events.Histograms("weights/layer.weight")
    assert drawn.step == 2
    assert list(drawn.histogram_value.bucket)[-2:] == [3.0, 4.0]
