"""``colossus plot``: rows in, panels out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from colossus.chart import Panel
from colossus.cli.main import main
from colossus.cli.plot import metrics_of, short_names
from colossus.cli.plot_panels import gaps, make_panels, moving_mean
from colossus.config import ConfigError
from colossus.launch.run_folder import last_metrics
from colossus.launch.run_metrics import RunMetrics

Rows = Sequence[dict[str, Any]]
Write = Callable[..., RunMetrics]


def row_of(step: int, **more: Any) -> dict[str, Any]:
    row = dict(step=step, loss=float(step), grad_norm=2.0, lr=1e-3, tokens=100, tokens_per_second=50.0)
    return row | dict(step_seconds=2.0, memory_bytes=3e9) | more


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(rows: Rows, name: str = "runs/a", end: str = "", **files: Any) -> RunMetrics:
        path = tmp_path / name / "metrics.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
        for file, value in files.items():
            (path.parent / file).write_text(json.dumps(value))
        return RunMetrics(path)

    return write


def panel_of(metrics: dict[str, RunMetrics], name: str, **options: Any) -> Panel:
    (panel,) = make_panels(metrics, names=[name], **options)
    assert isinstance(panel, Panel)
    return panel


def drawn(panel: Panel) -> dict[str, tuple[list[float], list[float]]]:
    return {line.label: (list(line.x), list(line.y)) for line in panel.lines if line.style != "faint"}


# rows


def test_of_a_step_that_came_again_the_later_row_counts_and_half_a_last_row_does_not(write: Write) -> None:
    rows = [row_of(1), row_of(2, loss=9.0), row_of(3), row_of(2, loss=5.0)]
    metrics = write(rows, end='{"step": 4, "lo')
    assert (metrics.steps, [row["loss"] for row in metrics.rows]) == ([1, 2, 3], [1.0, 5.0, 3.0])
    assert (metrics.seconds, metrics.tokens) == ([2.0, 4.0, 6.0], [100, 200, 300])


def test_a_row_without_the_number_of_a_step_is_left_out(write: Write) -> None:
    rows = [row_of(1), row_of(2) | {"step": None}, row_of(2) | {"step": "two"}, {"loss": 1.0}, row_of(3)]
    assert write(rows).steps == [1, 3]


def test_rows_that_cannot_be_read_are_not_none(tmp_path: Path) -> None:
    assert RunMetrics(tmp_path / "metrics.jsonl").steps == []
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        RunMetrics(tmp_path / "metrics.jsonl")
    assert last_metrics(tmp_path) is None


def test_tokens_and_speed_of_one_replica_count_for_all(write: Write) -> None:
    rows = [row_of(1, replica=0), row_of(2, tokens=400, tokens_per_second=200.0)]
    metrics = write(rows, **{"config.json": dict(parallel=dict(data=4))})
    assert metrics.tokens == [400, 800]
    assert drawn(panel_of({"a": metrics}, "throughput"))[""][1] == [200.0, 200.0]
    assert write(rows, "alone").tokens == [100, 500]


# panels


def test_the_x_axis_is_steps_tokens_or_the_time_of_steps(write: Write) -> None:
    metrics = {
        "a": write([row_of(step, step_seconds=60.0) for step in (5, 6, 8)]),
        "b": write([row_of(1, step_seconds=30.0, tokens=7)], "runs/b"),
    }
    found = {x: panel_of(metrics, "loss", x=x) for x in ("step", "tokens", "time")}
    assert [panel.x_label for panel in found.values()] == ["step", "tokens", "minutes in steps"]
    places = {x: {name: xs for name, (xs, _) in drawn(panel).items()} for x, panel in found.items()}
    assert places["step"] == {"a": [5, 6, 8], "b": [1]}
    assert places["tokens"] == {"a": [100, 200, 300], "b": [7]}
    assert places["time"] == {"a": [1, 2, 3], "b": [0.5]}


def test_every_panel_of_which_there_are_numbers(write: Write) -> None:
    routers = {f"blocks.{at}.router": dict(max_over_mean=at + 1.5, entropy=0.5, tokens=[3, at]) for at in (0, 1)}
    more = dict(memory_reserved_bytes=4e9, mfu=0.4, consensus_distance_relative=0.1, experts=routers)
    comm = dict(data=dict(calls=2, bytes=3000.0))
    evaluated = {"validation_loss": 2.5, "validation_accuracy": 0.5}
    evaluated |= {"ema.validation_loss": 2.25, "ema.validation_accuracy": 0.75}
    first = write(
        [row_of(1, **more, comm=comm), row_of(2, **more, comm=comm | dict(tensor=dict(bytes=10))) | evaluated]
    )
    second = write([row_of(1)], "runs/b")
    panels = {panel.title: panel for panel in make_panels({"a": first, "b": second})}
    assert list(panels) == [
        "loss", "validation_accuracy", "gradient norm", "learning rate", "tokens per second", "seconds of a step",
        "memory", "model FLOP utilisation", "relative distance of the replicas",
        "tokens of the busiest expert over the mean", "entropy of the routers' scores",
        "sent by the first rank in a step",
    ]  # fmt: skip
    loss = panels["loss"]
    assert isinstance(loss, Panel)
    assert drawn(loss) == {
        "a": ([1, 2], [1.0, 2.0]),
        "a validation": ([2], [2.5]),
        "a validation ema": ([2], [2.25]),
        "b": ([1], [1.0]),
    }
    styles = [(line.style, line.colour) for line in loss.lines]
    assert styles == [
        ("line", 0),
        ("markers", 0),
        ("markers", 2),
        ("line", 1),
    ]  # a run's line has one colour everywhere
    accuracy = panels["validation_accuracy"]
    assert isinstance(accuracy, Panel)
    assert {name: y for name, (_, y) in drawn(accuracy).items()} == {"a": [0.5], "a ema": [0.75]}
    memory, busiest = panels["memory"], panels["tokens of the busiest expert over the mean"]
    assert isinstance(memory, Panel)
    assert isinstance(busiest, Panel)
    assert memory.y_label == "GB"
    assert {name: y[0] for name, (_, y) in drawn(memory).items()} == pytest.approx({"a": 3, "a reserved": 4, "b": 3})
    assert {name: y for name, (_, y) in drawn(busiest).items()} == {
        "a blocks.0.router": [1.5, 1.5], "a blocks.1.router": [2.5, 2.5],
    }  # fmt: skip
    sent = panels["sent by the first rank in a step"]
    assert {name: y for name, (_, y) in drawn(sent).items()} == {"a data": [3000.0, 3000.0], "a tensor": [10.0]}


def test_any_key_of_the_rows_is_a_panel_and_a_pattern_or_a_list_has_a_line_for_each(write: Write) -> None:
    rows = [row_of(1, rows_touched=7, experts={"blocks.0.router": dict(tokens=[3, 5])}, alpha=dict(words=0.5, on=True))]
    metrics = {"a": write(rows)}
    assert drawn(panel_of(metrics, "rows_touched")) == {"": ([1], [7.0])}
    assert drawn(panel_of(metrics, "experts.*.tokens")) == {
        "blocks.0.router 0": ([1], [3]),
        "blocks.0.router 1": ([1], [5]),
    }
    assert drawn(panel_of(metrics, "alpha")) == {"": ([1], [0.5])}


def test_a_mean_is_over_the_steps_around_each_and_keeps_gaps(write: Write) -> None:
    assert moving_mean([1, 2, 3, 4], [1.0, 2.0, 6.0, 4.0], 3) == [1.5, 3.0, 4.0, 5.0]
    assert moving_mean([1, 2, 3, 4], [1.0, 2.0, 6.0, 4.0], 2) == [1.5, 4.0, 5.0, 4.0]
    assert moving_mean([1, 2, 10, 11], [1.0, 3.0, 5.0, 7.0], 3) == [2.0, 2.0, 6.0, 6.0]
    found = moving_mean([1, 2, 3], [1.0, math.nan, 3.0], 3)
    assert found[::2] == [1.0, 3.0]
    assert math.isnan(found[1])
    rows = [row_of(step, lr=float(step)) for step in range(1, 6)]
    rows[0]["validation_loss"] = 7.0
    metrics = {"a": write(rows)}
    smooth = panel_of(metrics, "loss", smooth=5)
    assert [(line.style, line.colour, line.y[0]) for line in smooth.lines] == [
        ("faint", 0, 1.0), ("line", 0, 2.0), ("markers", 0, 7.0),
    ]  # fmt: skip
    assert [(line.style, line.y[0]) for line in panel_of(metrics, "lr", smooth=5).lines] == [("line", 1.0)]


def test_numbers_that_cannot_be_drawn_are_told(write: Write) -> None:
    metrics = {"a": write([row_of(1), row_of(2, loss=math.nan, grad_norm=0.0), row_of(3, loss=math.inf)])}
    assert gaps(make_panels(metrics, names=["loss", "grad_norm", "lr"])) == [
        "loss: 2 of 3 numbers are NaN or infinite (first at step 2): gaps",
        "gradient norm: 1 of 3 numbers are NaN, infinite or not above zero (first at step 2): gaps",
    ]


# the command


def test_runs_are_named_by_what_differs() -> None:
    def names(*paths: str) -> list[str]:
        return short_names([Path(path, "metrics.jsonl") for path in paths])

    assert names("/home/runs/gpt-20260101-000000") == ["gpt-20260101-000000"]
    assert names("/r/gpt-sgp", "/r/gpt-d-psgd", "/r/gpt") == ["gpt-sgp", "gpt-d-psgd", "gpt"]
    assert names("/r/gpt-sgp-s1", "/r/gpt-d-psgd-s1") == ["sgp", "d-psgd"]
    assert names("/a/run", "/b/run") == ["a", "b"]
    assert names("/r/a-b", "/r/a/b") == ["/r/a-b", "/r/a/b"]


def test_a_run_is_a_folder_a_file_or_a_name(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write([row_of(1)], "runs/gpt-20260101-000000")
    write([row_of(1)], "runs/gpt-20260102-000000")
    write([], "runs/gpt-20260103-000000")
    newest = Path("runs/gpt-20260102-000000/metrics.jsonl")
    assert metrics_of("gpt") == metrics_of(str(newest)) == metrics_of(str(newest.parent)) == newest
    for given, problem in {
        "gtp": "gtp: no such path, and no run in runs/gtp-* has rows",
        "runs/gtp": "runs/gtp: no such path",
        "runs": "runs is no run folder: it has no metrics.jsonl; there are runs in it: runs/*/",
    }.items():
        with pytest.raises(ConfigError) as error:
            metrics_of(given)
        assert error.value.problems == [problem]


def test_the_command(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    write([row_of(1), row_of(2, loss=math.nan)])
    write([row_of(1)], "runs/b")
    write([], "runs/none")

    def plot(*words: str) -> tuple[int, str]:
        code = main(["plot", *words])
        out, err = capfd.readouterr()
        assert not (out and err)
        return code, out + err

    code, out = plot("runs/a", "runs/b", "./runs/a")
    lines = out.splitlines()
    assert (code, lines[:2]) == (0, ["a: 2 steps, runs/a/metrics.jsonl", "b: 1 step, runs/b/metrics.jsonl"])
    assert lines[-1] == "loss, a: 1 of 2 numbers are NaN or infinite (first at step 2): gaps"
    assert max(map(len, lines)) <= 120
    assert any("loss" in line and "gradient norm" in line for line in lines)  # beside each other
    code, out = plot("runs/a", "--panels", "loss,lr", "--out", "a.svg", "--x", "time", "--smooth", "3")
    assert (code, out.splitlines()[1]) == (0, "drawn in a.svg")
    assert "<!-- learning rate -->" in Path("a.svg").read_text()
    code, out = plot("runs/a", "--panels", "los")
    assert code == 2
    assert "--panels los: the rows have no such numbers; did you mean loss?" in out
    assert "keys: step, loss" in out
    assert plot("runs/none") == (2, "colossus: runs/none/metrics.jsonl has no rows: no step has ended yet\n")
    assert plot("runs/a", "--out", "a.gif") == (
        2,
        "colossus: --out a.gif: the name of a picture ends with .svg, .png, .pdf\n",
    )
