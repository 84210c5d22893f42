"""``colossus launch`` from outside: processes, exit codes, signals, failures, run folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.launching import (
    LAUNCH,
    ROOT,
    TINY,
    Process,
    children,
    environment,
    failed_ranks,
    finish,
    has_rows,
    is_running,
    launch,
    rows_of,
    start,
    start_slurm_tasks,
    wait_for,
)
from helpers.ports import free_port

from colossus.launch import command

# -- a run that goes well -------------------------------------------------------------------------------------


def test_a_run_prints_lines_and_fills_its_folder(tmp_path: Path) -> None:
    code, out, err = launch(tmp_path)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "tiny: data 2, 2 processes on cpu, 10 parameters"
    assert [line.split("  ")[0] for line in lines[2:-1]] == [
        *("step 1/5", "step 2/5", "step 2/5", "step 4/5", "step 4/5", "step 5/5", "step 5/5")
    ]
    assert lines[-1].startswith("done: 5 steps")
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["tokens"] for row in rows] == [4] * 5
    assert ["validation_loss" in row for row in rows] == [False, True, False, True, True]
    assert rows[4]["loss"] < rows[0]["loss"]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["parallel"]["data"] == 2
    versions = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert {"colossus", "torch", "python", "platform", "git", "data"} <= set(versions)
    assert not failed_ranks(tmp_path / "run")


def test_a_config_that_differs_between_processes_is_refused_by_name(tmp_path: Path) -> None:
    """A batch size that a file takes from WORLD_SIZE, which only ranks have."""
    file = tmp_path / "differs.py"
    own = "import os\ntrain |= dict(global_batch_size=4 * int(os.environ.get('WORLD_SIZE', '1')))\n"
    file.write_text(TINY.read_text() + own)
    command_line = [sys.executable, "-m", "colossus", "launch", str(file), "--run-dir", "run"]
    code, _, err = finish(start(command_line, tmp_path))
    assert code == 2
    assert "the config file does not say the same in each process of the run" in err
    assert "train.global_batch_size: 8 here, 4 in the launcher" in err


def test_overrides_and_a_dollar_sign_reach_the_workers(tmp_path: Path) -> None:
    code, out, _ = launch(tmp_path, "train.steps=1", "name=cost${local_rank}$5")
    assert code == 0
    assert out.startswith("cost${local_rank}$5: data 2")
    assert len(rows_of(tmp_path / "run")) == 1


@pytest.mark.long
@pytest.mark.parametrize("new_python", [False, True])
def test_torchrun_starts_the_same_run(tmp_path: Path, new_python: bool) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    code, out, _ = finish(start([*torchrun, *LAUNCH[1:]], tmp_path, new_python=new_python))
    assert code == 0
    check_run_under_torchrun(tmp_path, out)


def test_what_torchrun_starts_is_the_same_run(tmp_path: Path) -> None:
    """Join by the variables that torchrun sets."""
    of_all = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    ranks = [
        start(LAUNCH, tmp_path, **of_all, RANK=str(rank), LOCAL_RANK=str(rank), TORCHELASTIC_RUN_ID="none")
        for rank in range(2)
    ]
    ended = [finish(rank) for rank in ranks]
    assert [code for code, _, _ in ended] == [0, 0], ended
    check_run_under_torchrun(tmp_path, "".join(out for _, out, _ in ended))


def check_run_under_torchrun(tmp_path: Path, out: str) -> None:
    assert out.count("done: 5 steps") == 1
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("tiny-20")
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3, 4, 5]


def test_slurm_starts_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "metrics.jsonl").write_text('{"step": 1}\n')
    ended = [finish(task) for task in start_slurm_tasks(tmp_path, "--run-dir", "run")]
    assert [code for code, _, _ in ended] == [0, 0]
    assert "done: 5 steps" in ended[0][1]
    assert ended[1][1] == ""
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2, 3, 4, 5]

    ended = [finish(task) for task in start_slurm_tasks(tmp_path, "--run-dir", "held")]
    assert [code for code, _, _ in ended] == [2, 2]
    assert "holds the metrics of another run" in ended[0][2]
    assert ended[1][2] == ""


# -- failures -------------------------------------------------------------------------------------------------


def test_a_rank_that_raises_is_named_with_its_traceback(tmp_path: Path) -> None:
    code, _, err = launch(tmp_path, TROUBLE="raise")
    assert code == 1
    assert err.count("run failed") == 1
    assert "run failed: rank 1 at step 3" in err
    assert "data 1) raised ValueError" in err
    assert 'raise ValueError("the third step is one too many")' in err
    assert "last collectives of rank 1" in err
    assert "all_reduce over data" in err
    assert "rank 0 stopped because rank 1 went away." in err
    assert "colossus/launch/" not in err
    assert "torch/distributed/elastic" not in err
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2]
    records = {record.rank: record for record in failed_ranks(tmp_path / "run")}
    assert (records[1].kind, records[1].step) == ("error", 3)


@pytest.mark.usefixtures("short_grace")
def test_a_rank_that_hangs_is_shown_where_it_hangs(tmp_path: Path) -> None:
    code, _, err = launch(tmp_path, "comm.timeout_seconds=2", TROUBLE="hang")
    assert code == 1
    assert "run failed: rank 1 at step 3" in err
    assert "did not reach the end of its step" in err
    assert "in _trouble" in err
    assert "who waits for whom:\n  rank 0 waits in #9 all_reduce [12 float32] at colossus/gradients" in err
    assert "over data; rank 1 did not come to it, the last there: #8 all_reduce [2 float64]" in err
    assert "rank 0 stopped because rank 1 did not answer." in err


@pytest.mark.long
def test_under_torchrun_the_failing_rank_prints_the_block(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    code, _, err = finish(start([*torchrun, *LAUNCH[1:]], tmp_path, TROUBLE="raise"))
    assert code != 0
    assert err.count("run failed: rank 1 at step 3") == 1
    assert err.count("ValueError: the third step is one too many") == 1


# -- signals --------------------------------------------------------------------------------------------------


@pytest.fixture
def long_run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Process]:
    overrides = ["train.steps=100000", "train.eval_every=0"]
    command_line = [*LAUNCH, "--run-dir", "run", *overrides]
    process = start(command_line, tmp_path, new_python=getattr(request, "param", False), STEP_SECONDS="0.02")
    try:
        wait_for(lambda: has_rows(process, tmp_path / "run", 3), process.pid)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("long_run", "signum", "code"),
    [
        pytest.param(True, signal.SIGINT, 130, marks=pytest.mark.long),
        (False, signal.SIGINT, 130),
        (False, signal.SIGTERM, 143),
    ],
    indirect=["long_run"],
)
def test_a_signal_stops_all_ranks_after_a_whole_step(
    tmp_path: Path, long_run: Process, signum: signal.Signals, code: int
) -> None:
    ranks = children(long_run.pid)
    assert len(ranks) == 2
    long_run.send_signal(signum)
    ended, out, err = finish(long_run)
    assert (ended, err) == (code, "")
    steps = [row["step"] for row in rows_of(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))
    assert f"stopped by {signum.name} after step {steps[-1]}; metrics are in run/metrics.jsonl" in out
    assert not any(is_running(rank) for rank in ranks)
    # a clean stop: nobody had to be ended by force
    assert not failed_ranks(tmp_path / "run")


def test_a_signal_to_one_rank_stops_all(tmp_path: Path, long_run: Process) -> None:
    os.kill(children(long_run.pid)[1], signal.SIGTERM)
    code, out, err = finish(long_run)
    assert (code, err) == (143, "")
    assert "stopped by SIGTERM after step" in out


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path, long_run: Process) -> None:
    ranks = children(long_run.pid)
    long_run.kill()
    wait_for(lambda: not any(is_running(rank) for rank in ranks), *ranks)


@pytest.mark.long
def test_a_blocked_rank_does_not_delay_the_stop(tmp_path: Path) -> None:
    process = start([*LAUNCH, "--run-dir", "run"], tmp_path, TROUBLE="hang")
    wait_for(lambda: has_rows(process, tmp_path / "run", 2), process.pid)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert (code, err) == (143, "")
    assert "stopped by SIGTERM after step 2" in out
    kinds = {record.kind for record in failed_ranks(tmp_path / "run")}
    # a rank that is ended a little later may have seen its peer go
    assert "stuck" in kinds
    assert kinds <= {"stuck", "communication"}


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    """All ranks raise the same."""
    code, out, err = launch(tmp_path, TROUBLE="nan")
    assert (code, "done:" in out) == (1, False)
    first = re.search(r"run failed: rank ([01]) at step 3", err)
    assert first is not None
    assert f"rank {1 - int(first[1])} raised the same error." in err


def test_a_culprit_that_is_slower_than_its_victims_is_named(tmp_path: Path) -> None:
    code, _, err = launch(tmp_path, TROUBLE="slow culprit")
    assert code == 1
    assert "run failed: rank 1 at step 3" in err
    assert "ValueError: the culprit" in err


# -- errors before any process --------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ([], {"nnodes": (3, 3), "rdzv_endpoint": "a:1"}, "2 processes cannot be shared equally among the nodes"),
        ([], {"run_dir": "a" * 300}, "cannot be used: File name too long"),
        (["parallel.data=1000000000", "train.global_batch_size=1000000000"], {}, "on one node are more than 4096"),
        (["model=None"], {}, "model: the config has none: model = dict(type='GPT', ...)"),
        (["data=None"], {}, "data: the config has none: data = dict(type='PythonStdlib')"),
        ([], {"nnodes": (2, 2), "rdzv_endpoint": "a:b"}, "--rdzv-endpoint a:b: must be host:port"),
        ([], {"nnodes": (2, 2), "rdzv_endpoint": "a:99999"}, "with a port between 1 and 65535"),
        ([], {"run_dir": "file"}, "is a file, not a folder"),
        ([], {"run_dir": "held"}, "holds the metrics of another run"),
    ],
)
def test_config_errors_exit_with_2(
    overrides: list[str], options: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_text("")
    Path("held").mkdir()
    Path("held/metrics.jsonl").write_text('{"step": 1}\n')
    assert command.run(str(TINY), overrides, **options) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("colossus: ")
    assert message in printed.err
    assert printed.out == ""


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("rank", "local_rank", "where"), [("0", "0", ""), ("2", "0", " (rank 2 on "), ("3", "1", None)]
)
def test_under_torchrun_a_bad_config_is_told_once_on_each_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, local_rank: str, where: str | None
) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": "4", "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, value)
    for file, nproc, words in (("absent.py", None, "no such file: absent.py"), (str(TINY), 8, "leave --nproc out")):
        assert command.run(file, [], nproc=nproc) == 2
        err = capsys.readouterr().err
        assert (words in err) == (where is not None)
        assert (where or "") in err


@pytest.mark.usefixtures("no_processes")
def test_a_dry_run_says_everything_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    config = ROOT / "configs" / "gpt_stdlib.py"
    assert command.run(str(config), ["train.steps=7"], run_dir="elsewhere", dry_run=True) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["plan"] == "data 2 x tensor 2 (1d): 4 processes"
    assert lines["parameters"] == "842,496 in the model, 431,104 on rank 0"
    assert lines["batch"] == "32 sequences = data 2 x microbatches 1 x 16"
    assert lines["steps"].startswith("7, fp32")
    assert not Path("elsewhere").exists()


# -- the run folder -------------------------------------------------------------------------------------------


def test_config_errors_need_no_torch() -> None:
    code = "import sys, colossus.launch.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment()).returncode == 0
