"""Hooks that a config names: what they do on what a run tells them, without processes."""

from __future__ import annotations

import csv
import json
import statistics
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.launched.fake_engine import FakeEngine

from colossus.config import ConfigError, load_config
from colossus.engine.fit import Hook, fit
from colossus.engine.results import EvalResult
from colossus.launch.checks import check_required
from colossus.monitor.hooks.callback import Callback
from colossus.monitor.hooks.csv_file import CSV
from colossus.monitor.hooks.early_stop import EarlyStop
from colossus.monitor.hooks.options import CallbackOptions
from colossus.monitor.hooks.throughput import Throughput
from colossus.monitor.hooks.tracker import Tracker
from colossus.monitor.metrics import Metrics
from colossus.registry import HOOKS


class Evaluated(FakeEngine):
    """Evaluates after each step, with these losses."""

    def __init__(self, losses: list[float], **options: Any) -> None:
        super().__init__(steps=len(losses), eval_every=1, **options)
        self.losses = losses

    def evaluate(self) -> EvalResult:
        loss = self.losses[self.completed_steps - 1]
        return EvalResult(3 * loss, 3, {"accuracy": (1 - loss, 1)}, step=self.completed_steps)


def resumed(engine: Any, step: int, *, is_own: bool = True) -> Any:
    engine.completed_steps, engine.checkpoints.is_same_run = step, is_own
    engine.checkpoints.resumed_from = Path("runs/first/checkpoints/step-00000003")
    return engine


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Averages(Hook):
    """As an average of the weights that is evaluated too."""

    def add_to_evaluation(self, engine: Any, summary: EvalResult) -> Mapping[str, float]:
        return {"ema.validation_loss": summary.loss / 2}

    def add_to_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"averaged": 2 * row["step"]}


# -- what the schema says -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (dict(type="EarlyStop", patience=0), "hooks.0.patience: must be at least 1, got 0"),
        (dict(type="EarlyStop", pateince=3), "did you mean hooks.0.patience?"),
        (dict(type="EarlyStop", mode="least"), "hooks.0.mode: must be 'min' or 'max'"),
        (dict(type="BestCheckpoint", keep=-1), "hooks.0.keep: must be at least 1"),
        (dict(type="Histograms", weights=False, gradients=False), "hooks.0: gradients = False and weights = False"),
        (dict(type="WandB", mode="of"), "hooks.0.mode: must be 'online', 'offline' or 'disabled'"),
        (dict(type="Callback"), "hooks.0: set a function for one of on_train_start"),
        (dict(type="Callback", on_step_end="fractions:Fractoin"), "did you mean 'Fraction'?"),
        (dict(type="Callback", on_step_edn=print), "did you mean hooks.0.on_step_end?"),
        (dict(type="fractions:Fractoin"), "hooks.0.type: 'fractions:Fractoin'"),
        ("EarlyStopp", "Did you mean 'EarlyStop'?"),
    ],
)
def test_options_are_checked_when_a_config_is_read(hook: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(dict(hooks=[hook]))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("hook", "more", "message"),
    [
        ("EarlyStop", {}, "hooks.0: EarlyStop needs 'validation_loss' of evaluations, but train.eval_every = 0"),
        (
            "BestCheckpoint",
            dict(train=dict(eval_every=2), checkpoint=dict(dir="there")),
            "hooks.0: BestCheckpoint would save into checkpoint.dir = 'there'",
        ),
        ("NeedsNothing", {}, "hooks.0: NeedsNothing needs nowhere_to_be_found, which is not installed"),
    ],
)
def test_what_a_hook_needs_is_checked_before_a_launch(
    hook: str, more: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Missing(HOOKS.options("MLflow")):  # type: ignore[misc]
        package = "nowhere_to_be_found"

    monkeypatch.setitem(HOOKS._options, "NeedsNothing", Missing)
    monkeypatch.setitem(HOOKS._entries, "NeedsNothing", Tracker)
    model = dict(type="GPT", num_layers=1, hidden_size=8, num_heads=2, vocab_size=256, seq_len=8)
    config = load_config(dict(hooks=[hook], model=model, data="PythonStdlib", **more))
    with pytest.raises(ConfigError) as caught:
        check_required(config)
    assert message in str(caught.value)


def test_callbacks_are_all_methods_of_a_hook() -> None:
    methods = {name for name in vars(Hook) if not (name.startswith("_") or "state" in name)}
    assert set(CallbackOptions.model_fields) == methods


# -- hooks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "losses", "steps"),
    [
        (dict(patience=2), [5.0, 4.0, 4.5, 4.1, 3.0, 2.0], 5),
        (dict(patience=2), [5.0, 4.0, 4.5, 3.9, 4.0, 4.0, 3.0, 2.0], 7),
        (dict(patience=2, min_delta=0.5), [5.0, 4.0, 3.6, 3.5, 0.0, 0.0], 5),
        (dict(patience=1, mode="max", metric="validation_accuracy"), [5.0, 4.0, 4.5, 1.0, 1.0], 4),
        (dict(patience=1, metric="ema.validation_loss"), [5.0, 4.0, 4.5, 1.0, 1.0], 4),
        (dict(patience=2), [float("nan"), float("nan"), 1.0, 1.0], 3),
    ],
)
def test_early_stop(
    options: dict[str, Any], losses: list[float], steps: int, capfd: pytest.CaptureFixture[str]
) -> None:
    summary = fit(Evaluated(losses), [EarlyStop(**options), Averages()])
    assert (summary.steps, summary.reason) == (steps, "stopped")
    metric = options.get("metric", "validation_loss")
    assert capfd.readouterr().out.startswith(f"stopped early after step {steps}: {metric} was no better")


def test_early_stop_goes_on_counting(capfd: pytest.CaptureFixture[str]) -> None:
    losses = [4.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    first = EarlyStop(patience=4)
    fit(Evaluated(losses[:3]), [first])
    assert capfd.readouterr().out == ""
    second = EarlyStop(patience=4)
    second.load_state_dict(first.state_dict())
    assert fit(resumed(Evaluated(losses), 3), [second]).steps == 6
    assert "no better than 4 after step 1 in 4 evaluations in a row" in capfd.readouterr().out
    third = EarlyStop(patience=4)
    third.load_state_dict(second.state_dict())
    assert fit(resumed(Evaluated(losses), 5), [third]).steps == 6  # it had stopped


def test_a_metric_that_is_not_there_is_an_error_at_the_first_evaluation() -> None:
    with pytest.raises(ValueError, match="has no 'validation_acuracy'; did you mean 'validation_accuracy'"):
        fit(Evaluated([1.0, 2.0]), [EarlyStop(metric="validation_acuracy")])


@pytest.mark.parametrize(
    ("train", "message"), [({}, "train.eval_every = 0"), (dict(eval_every=1, validation=False), "no validation data")]
)
def test_a_loop_without_evaluations_is_told(train: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"EarlyStop needs 'validation_loss' of evaluations, but .*{message}"):
        fit(FakeEngine(steps=1, **train), [EarlyStop()])


def test_what_hooks_add_is_in_the_rows_whatever_their_order(tmp_path: Path) -> None:
    added_rows: list[Any] = []
    tells = Callback(on_row=added_rows.append, add_to_row=lambda row: {"twice": 2 * row["loss"]})
    for number, hooks in enumerate(
        ([tells, Averages(), Throughput(window=2)], [Throughput(window=2), Averages(), tells])
    ):
        path = tmp_path / f"{number}.jsonl"
        fit(Evaluated([5.0, 4.0, 3.0]), [*hooks, Metrics(path)])
        assert added_rows == rows_of(path)
        assert [row["ema.validation_loss"] for row in added_rows] == [2.5, 2.0, 1.5]
        assert [row["averaged"] for row in added_rows] == [2, 4, 6]
        assert [row["twice"] for row in added_rows] == [2 * row["loss"] for row in added_rows]
        seconds = [row["step_seconds"] for row in added_rows]
        assert [row["step_seconds_median"] for row in added_rows] == pytest.approx(
            [seconds[0], statistics.median(seconds[:2]), statistics.median(seconds[1:])]
        )
        assert added_rows[2]["tokens_per_second_window"] == pytest.approx(14 / sum(seconds[1:]))
        added_rows.clear()


def test_functions_are_called_as_methods_are() -> None:
    calls: list[Any] = []
    hook = Callback(on_step_end=lambda engine, result: calls.append(result.step), on_train_end="builtins:id")
    fit(FakeEngine(steps=2), [hook])
    assert calls == [1, 2]


# -- CSV, and what all trackers do ----------------------------------------------------------------------------


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class Grows(Hook):
    """A number that is there from step 3 on, and one in a nest."""

    def add_to_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        late = {"late": row["step"]} if row["step"] >= 3 else {}
        return {"comm": {"data": {"bytes": 7, "names": ["a"]}}, **late}


def test_csv_has_a_column_for_each_number_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    def hooks() -> list[Hook]:
        return [Metrics(path), CSV(), Grows()]

    engine = FakeEngine(steps=6, eval_every=4)
    engine.run.folder = tmp_path
    fit(engine, hooks())
    before = table(tmp_path / "metrics.csv")
    again = resumed(FakeEngine(steps=7, eval_every=4), 5)
    again.run.folder = tmp_path
    fit(again, hooks())
    after = table(tmp_path / "metrics.csv")
    assert before[:5] == after[:5]
    assert [row["step"] for row in after] == list("1234567")
    assert [row["late"] for row in after] == ["", "", *"34567"]
    assert [row["comm.data.bytes"] for row in after] == ["7"] * 7
    assert "comm.data.names" not in after[0]
    for line, row in zip(after, rows_of(path), strict=True):
        assert float(line["loss"]) == row["loss"]
        assert line["validation_loss"] == str(row.get("validation_loss", ""))


class Breaks(Tracker):
    """Fails where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.called = where, list[str]()

    def _call(self, name: str) -> None:
        self.called.append(name)
        if name == self.where:
            raise ConnectionError("no network")

    def start(self, run: Any) -> None:
        self._call("start")

    def write(self, row: Mapping[str, Any]) -> None:
        self._call("write")

    def close(self, *, is_good: bool) -> None:
        self._call(f"close {is_good}")


@pytest.mark.parametrize("where", ["start", "write", "close True", "nowhere"])
def test_a_tracker_that_fails_is_one_warning(where: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tracker = Breaks(where)
    engine = FakeEngine(steps=3)
    engine.checkpoints.on_save_after = {2}
    assert fit(engine, [Metrics(tmp_path / "m"), tracker]).steps == 3
    warning = "colossus: Breaks: ConnectionError: no network; rows may be missing, training continues\n"
    assert capfd.readouterr().err == (warning if where != "nowhere" else "")
    assert tracker.called == (["start"] if where == "start" else ["start", "write", "write", "write", "close True"])


def test_a_tracker_is_closed_after_an_error_and_not_waited_for_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("colossus.monitor.hooks.tracker.PATIENCE", 0.1)
    is_over = threading.Event()

    class Hangs(Breaks):
        def write(self, row: Mapping[str, Any]) -> None:
            is_over.wait()

    quick, slow = Breaks("nowhere"), Hangs("nowhere")
    with pytest.raises(ArithmeticError):
        fit(FakeEngine(steps=3, fail_at=2), [Metrics(tmp_path / "m"), quick, slow])
    assert quick.called == ["start", "write", "close False"]
    is_over.set()
    assert "Hangs: has not taken all rows" in capfd.readouterr().err


def test_an_id_is_of_the_run_that_goes_on(tmp_path: Path) -> None:
    for is_own in (True, False):
        tracker = Breaks("nowhere")
        tracker.load_state_dict({"run_id": "first"})
        fit(resumed(FakeEngine(steps=3), 2, is_own=is_own), [Metrics(tmp_path / "m"), tracker])
        assert tracker.state_dict() == ({"run_id": "first"} if is_own else {})


def test_a_tracker_says_that_it_needs_the_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"CSV passes on the rows that Metrics writes: .*Metrics first"):
        fit(FakeEngine(steps=1), [CSV(path=str(tmp_path / "t.csv")), Metrics(tmp_path / "m")])
