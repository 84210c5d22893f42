"""``colossus compare``: what is refused before a run starts, what the table says of rows, one small real comparison."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.launching import TINY, finish, start
from rich.console import Console

from colossus.cli.main import main
from colossus.compare import run_compare, variants
from colossus.compare.jobs import Job, check_jobs, make_jobs
from colossus.compare.run_compare import run_all
from colossus.compare.summary import Comparison, Ended, Mean, Row, compare, print_table
from colossus.config import ConfigError, as_dict, load_config
from colossus.config.overrides import apply_overrides, plan_overrides, strategy_overrides

FILE = """
parallel = dict(data=2, tensor=dict(size=2, mode="2d"), strategy=dict(type="sgp", peers=1))
model = dict(type="GPT", num_layers=2, hidden_size=64, num_heads=4)
data = dict(type="PythonStdlib")
train = dict(steps=40, global_batch_size=8)
"""
STEPS = 40


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "small.py"
    path.write_text(FILE)
    return str(path)


# strategies and plans as text


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("  sgp   overlap=1 graph=ring ", dict(type="sgp", overlap=1, graph="ring")),
        (
            """x graph=dict(type="a",sizes=[2,(3,4)]) last=1.5""",
            dict(type="x", graph=dict(type="a", sizes=[2, (3, 4)]), last=1.5),
        ),
        ("sgp graph.type=torus graph.rows=2", dict(type="sgp", graph=dict(type="torus", rows=2))),
    ],
)
def test_a_strategy_as_text(text: str, spec: dict[str, Any]) -> None:
    held = dict(parallel=dict(strategy=dict(type="other", period=3)))
    got = apply_overrides(held, strategy_overrides(text))["parallel"]["strategy"]
    assert (got if isinstance(got, dict) else dict(type=got)) == spec
    assert held["parallel"]["strategy"] == dict(type="other", period=3)


@pytest.mark.parametrize(
    ("overrides", "text", "words"),
    [
        (strategy_overrides, "", "parallel.strategy.type: must be a registered name or a callable, got ''"),
        (strategy_overrides, "overlap=1", "no data-parallel strategy named 'overlap=1'"),
        (strategy_overrides, "sgp overlap", "'parallel.strategy.overlap' has no '='"),
        (plan_overrides, "data 4", "'parallel.data' has no '='"),
        (plan_overrides, "dat=4", "parallel.dat: no such key; did you mean parallel.data?"),
        (plan_overrides, "data=4 trian.steps=3", "parallel.trian: no such key"),
    ],
)
def test_text_that_is_neither(file: str, overrides: Callable[[str], list[str]], text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(file, ["parallel.tensor=1", *overrides(text)])
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("data=4 train.steps=3", (4, 1)),
        ("tensor=4 tensor.mode=1d", (1, 4)),
        ("parallel.tensor.size=4", (2, 4)),  # the file has data 2
        ("data.type=PythonStdlib", (2, 1)),
        ("", (2, 1)),
    ],
)
def test_a_plan_as_text(file: str, text: str, sizes: tuple[int, int]) -> None:
    config = load_config(file, ["parallel.tensor=1", *plan_overrides(text)])
    assert (config.parallel.data, config.parallel.tensor.size) == sizes
    assert config.train.steps == (3 if "train.steps" in text else STEPS)


# refused before a run starts


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["nothing to compare: pass --strategies"]),
        (
            ["parallel.tensor=1", "--strategies", "sgb", "sgp ovrlap=1", "all_reduce", "sgp overlap=-1", "all_reduce"],
            [
                "small.py: 3 problems",
                "sgb: parallel.strategy.type: no data-parallel strategy named 'sgb'. Did you mean 'sgp'?",
                "sgp ovrlap=1: parallel.strategy.ovrlap: no such key; did you mean parallel.strategy.overlap?",
                "sgp overlap=-1: parallel.strategy.overlap: must be at least 0, got -1",
            ],
        ),
        (
            ["parallel.tensor=1", "checkpoint.resume=x", "--strategies", "sgp", "d-psgd"],
            ["small.py: checkpoint.resume = 'x': the runs of a comparison begin at the first step"],
        ),
        (["--plans", "data=3", "data=8"], ["small.py: data=3: train.global_batch_size = 8 is not a multiple of"]),
        (["parallel.strategy.peers=2", "--strategies", "sgp"], ["write the option into the text of a strategy"]),
    ],
)
def test_refused(
    file: str,
    arguments: list[str],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(Path(file).parent)
    assert main(["compare", file, *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    for word in words:
        assert word in err
    assert sorted(path.name for path in Path().iterdir()) == ["small.py"]


def test_models_and_data_are_checked_before_a_run_starts(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_model(config: Any) -> None:
        if config.parallel.data == 4:
            raise ConfigError("model: no such file")

    monkeypatch.setattr(variants, "check_model", check_model)
    made = make_jobs(file, [], plans=["data=2", "data=4"], num_seeds=2, root=tmp_path)
    with pytest.raises(ConfigError) as error:
        check_jobs(made)
    assert error.value.problems == ["data=4: model: no such file"]


# the runs: which are made, which are run


def jobs_of(
    file: str, root: Path, strategies: Sequence[str] = ("all_reduce", "sgp overlap=1"), **more: Any
) -> list[Job]:
    given = ["parallel.tensor=1", f"train.steps={STEPS}"]
    return make_jobs(file, given, strategies=strategies, root=root, **more)


def test_every_strategy_under_every_plan_with_every_seed(file: str, tmp_path: Path) -> None:
    jobs = jobs_of(file, tmp_path, plans=["data=2", "data=4 tensor=1"], num_seeds=2)
    assert [(job.name, job.folder.name) for job in jobs[:3]] == [
        ("all_reduce, data=2, seed 0", "all_reduce-data=2-seed0"),
        ("all_reduce, data=2, seed 1", "all_reduce-data=2-seed1"),
        ("all_reduce, data=4 tensor=1, seed 0", "all_reduce-data=4-tensor=1-seed0"),
    ]
    assert len({job.folder for job in jobs}) == len(jobs) == 8
    last = jobs[-1].config
    assert (last.parallel.strategy.spec(), last.parallel.data) == (dict(type="sgp", overlap=1), 4)
    assert (last.train.seed, last.comm.accounting, last.checkpoint.resume) == (1, True, "auto")


def write_rows(job: Job, rows: Sequence[dict[str, Any]]) -> None:
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (job.folder / "config.json").write_text(json.dumps(as_dict(job.config), default=str))


def row_of(step: int, **more: Any) -> dict[str, Any]:
    return dict(step=step, loss=float(STEPS - step), step_seconds=0.5, tokens_per_second=100.0, **more)


def test_a_failed_run_is_told_and_the_others_go_on_until_a_signal(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = jobs_of(file, tmp_path, ["all_reduce", "sgp", "sgp overlap=1", "sgp overlap=2", "sgp overlap=3"])
    write_rows(jobs[0], [row_of(step) for step in range(1, STEPS + 1)])
    write_rows(jobs[1], [row_of(step) for step in range(1, STEPS)])
    jobs[2].output.write_text(
        "step 1\n\n=== run failed: rank 1 at step 3 ===\nrank 1 (data 1) raised ValueError\n\n  Traceback\n"
    )
    codes = {"sgp": 0, "sgp overlap=1": 1, "sgp overlap=2": 130}
    launched: list[str] = []

    def launch(job: Job) -> int:
        launched.append(job.name)
        return codes[job.name]

    ended = {job.name: how for job, how in run_all(jobs, launch)}
    assert launched == ["sgp", "sgp overlap=1", "sgp overlap=2"]
    assert ended == {
        "all_reduce": Ended("done"),
        "sgp": Ended("done"),
        "sgp overlap=1": Ended("failed", "rank 1 (data 1) raised ValueError", 1),
        "sgp overlap=2": Ended("stopped", "by SIGINT", 130),
    }
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run 1 of 5: all_reduce  complete already"
    assert lines[3] == f"run 3 of 5: sgp overlap=1  prints to {jobs[2].output}"
    assert lines[4] == "run 3 of 5: sgp overlap=1  failed after 0:00: rank 1 (data 1) raised ValueError"


def test_a_run_that_a_hook_has_ended_early_is_complete_where_the_last_comparison_says_so(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []

    def launch(job: Job) -> int:
        launched.append(job.name)
        write_rows(job, [row_of(step) for step in range(1, STEPS)])
        return 130 if len(launched) == 2 else 0

    monkeypatch.setattr(run_compare, "_launch", launch)
    again = partial(run_compare.run, file, ["parallel.tensor=1"], strategies=["all_reduce", "sgp"], out=str(tmp_path))
    assert [again(), again(), again()] == [130, 0, 0]
    assert launched == ["all_reduce", "sgp", "sgp"]


# the table


def canned(file: str, root: Path) -> tuple[list[Job], dict[str, Ended]]:
    """A baseline; one that is twice as fast, sends every other step and logs its own loss; one that failed."""
    jobs = jobs_of(file, root, ["all_reduce", "sgp", "sgp overlap=2"])
    baseline, fast = [], []
    for step in range(1, STEPS + 1):
        loss = 5.0 - step / 20
        data = dict(data=dict(calls=2, bytes=3000.0), tensor=dict(calls=1, bytes=500.0))
        baseline.append(
            dict(step=step, loss=loss, tokens=400, tokens_per_second=400 / 0.2, step_seconds=0.2, comm=data)
        )
        seconds = 0.06 if step % 2 else 0.14
        sent = dict(data=dict(calls=1, bytes=4000.0)) if step % 2 == 0 else {}
        row = dict(step=step, loss=loss + 0.1, tokens=200, tokens_per_second=200 / seconds, step_seconds=seconds)
        fast.append({**row, "comm": sent, "replica": 0, "peer_wait_seconds": 0.001 * (step % 2)})
        if step % 10 == 0:
            baseline[-1]["validation_loss"] = loss - 0.5
            del fast[-1]["replica"]  # all replicas have met
            fast[-1] |= {"validation_loss": (loss - 0.5) * 1.05, "tokens": 400}
            fast[-1] |= {"consensus_distance": 7.0, "consensus_distance_relative": 1 / step}
    baseline[0] |= dict(step_seconds=5.0, tokens_per_second=80.0)  # warm-up
    write_rows(jobs[0], baseline)
    write_rows(jobs[1], fast)
    with (jobs[1].folder / "metrics.jsonl").open("a") as rows:
        rows.write('{"step": 41, "loss"')  # half a row
    return jobs, {"all_reduce": Ended("done"), "sgp": Ended("done"), "sgp overlap=2": Ended("failed", "no disk", 1)}


def numbers(row: Row) -> dict[str, float]:
    return {name: mean.mean for name, mean in row.means.items() if mean is not None}


def test_the_numbers_of_the_table(file: str, tmp_path: Path) -> None:
    found = compare(*canned(file, tmp_path))
    baseline, fast, failed = found.rows
    assert (found.equal_steps, found.equal_seconds) == (40, pytest.approx(4.0))
    # the losses are of the last two steps; 4 s are less than the baseline's first step, and all steps of the fast one
    assert numbers(baseline) == pytest.approx(
        dict(loss=5.0 - 39.5 / 20, validation_loss=2.5, step_seconds=0.2, tokens_per_second=2000.0, bytes_sent=3500.0)
    )
    loss = 5.1 - 39.5 / 20
    assert numbers(fast) == pytest.approx(
        dict(loss=loss, validation_loss=2.625, loss_at_time=loss, step_seconds=0.1, tokens_per_second=4000.0)
        | dict(bytes_sent=2000.0, wait_seconds=0.0005, consensus_distance=1 / 40)
    )
    assert (fast.loss_ratio, fast.tokens_ratio) == (pytest.approx(1.05), pytest.approx(2.0))
    assert (failed.problems, numbers(failed), failed.loss_ratio) == (["failed: no disk"], {}, None)


def printed(found: Comparison) -> list[str]:
    out = io.StringIO()
    print_table(found, Console(file=out, width=40))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_the_table_is_printed_whole(file: str, tmp_path: Path) -> None:
    found = compare(*canned(file, tmp_path))
    lines = printed(found)
    head, baseline, fast, failed, told = [" ".join(line.split()) for line in lines[:5]]
    assert head == "loss validation loss after 4 s tokens/s step sent/step waited/step distance"
    assert baseline == "all_reduce 3.0250 2.5000 +0.0 % - 2,000 x1.00 200 ms 3.50 KB - -"
    assert fast == "sgp 3.1250 2.6250 +5.0 % 3.1250 4,000 x2.00 100 ms 2.00 KB 500 us 0.025"
    assert (failed, told) == ("sgp overlap=2", "sgp overlap=2: failed: no disk")
    assert any("the mean of the last 20th of 40 steps" in line for line in lines)


def test_nothing_has_come_to_its_end(file: str, tmp_path: Path) -> None:
    lines = printed(compare(jobs_of(file, tmp_path), {"all_reduce": Ended("stopped", "by SIGINT", 130)}))
    assert lines[:2] == ["all_reduce: stopped: by SIGINT", "sgp overlap=1: not run"]


def test_seeds_are_averaged(file: str, tmp_path: Path) -> None:
    jobs = jobs_of(file, tmp_path, ["sgp"], num_seeds=3)
    for number, job in enumerate(jobs):
        rows = [row_of(step) for step in range(1, STEPS + 1)]
        for row in rows:
            row["loss"] = 1.0 + number
        write_rows(job, rows)
    ended = {job.name: Ended("done") for job in jobs}
    (row,) = compare(jobs, ended).rows
    assert row.means["loss"] == Mean(2.0, 1.0)
    assert "2.0000 (1.0000)" in printed(compare(jobs, ended))[1]
    ended[jobs[1].name] = Ended("failed", "why", 1)
    (row,) = compare(jobs, ended).rows
    assert (numbers(row), row.problems) == ({}, ["seed 1 failed: why"])
    ended[jobs[1].name] = Ended("done")
    write_rows(jobs[1], [{**row_of(step), "loss": math.nan} for step in range(1, STEPS + 1)])
    found = compare(jobs, ended)
    assert "nan" in printed(found)[1]
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["rows"][0]["means"]["loss"]["mean"] is None


# for real


def test_two_strategies_are_run_and_compared(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "colossus", "compare", str(TINY), "train.steps=6"]
    line += ["--strategies", "all_reduce", "sgp overlap=1", "--out", "out"]
    code, out, err = finish(start(line, tmp_path))
    assert code == 0, err
    assert "run 1 of 2: all_reduce  done after" in out
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert result["equal_steps"] == 6
    baseline, gossip = result["rows"]
    assert baseline["loss_ratio"] == 1.0
    assert gossip["label"] == "sgp overlap=1"
    assert gossip["means"]["validation_loss"]["mean"] > 0
    for row in (baseline, gossip):
        assert row["means"]["bytes_sent"]["mean"] > 0
        cells = next(line for line in out.splitlines() if line.startswith(row["label"]) and "run" not in line)
        assert f"{row['means']['validation_loss']['mean']:.4f}" in cells
    held = json.loads((tmp_path / "out" / "sgp-overlap=1" / "config.json").read_text())
    assert held["parallel"]["strategy"] == {"type": "sgp", "overlap": 1}
    # again: nothing is left to run; with another config the folder is another comparison's
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/metrics.jsonl")}
    code, out, err = finish(start(line, tmp_path))
    assert (code, out.count("complete already")) == (0, 2), err
    assert before == {path: path.stat().st_mtime_ns for path in before}
    code, out, err = finish(start([*line[:5], "train.steps=7", *line[6:]], tmp_path))
    assert code == 2
    assert "has another config (train): pass another folder" in err
