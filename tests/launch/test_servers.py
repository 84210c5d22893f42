"""Parameter servers that a launcher starts beside the ranks; `helpers/launched/served.py` is what runs."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest
from helpers.launching import LAUNCH, Process, children, finish, has_rows, is_running, rows_of, start, wait_for

from colossus.launch import deaths

CONFIG = Path(__file__).parents[1] / "helpers" / "launched" / "served.py"
FOREVER = ("train.steps=100000", "train.eval_every=0")


def begin(folder: Path, *arguments: str, **variables: str) -> Process:
    return start([*LAUNCH[:-1], str(CONFIG), "--run-dir", "run", *arguments], folder, **variables)


def run(folder: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
    return finish(begin(folder, *arguments, **variables))


def training(folder: Path, *arguments: str) -> tuple[Process, list[int]]:
    """A run that goes on and on, and its processes."""
    launcher = begin(folder, *FOREVER, *arguments, STEP_SECONDS="0.01")
    wait_for(lambda: has_rows(launcher, folder / "run", 3), launcher.pid)
    return launcher, children(launcher.pid)


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_servers_are_there_while_ranks_are(tmp_path: Path) -> None:
    shared = left_in(Path("/dev/shm"))
    code, out, err = run(tmp_path)
    assert (code, err) == (0, "")
    pids = [int(pid) for pid in re.findall(r"process (\d+)", out)]
    assert len(pids) == 2
    assert re.search(r"parameters at 2 server\(s\): 127.0.0.1 \(process \d+\), 127.0.0.1", out)
    assert not any(map(is_running, pids))
    assert left_in(tmp_path / "run" / "logs") == {"server0.log", "server1.log"}
    assert left_in(Path("/dev/shm")) <= shared


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_launcher(tmp_path: Path, signum: signal.Signals) -> None:
    launcher, pids = training(tmp_path)
    assert len(pids) == 4
    began = time.monotonic()
    launcher.send_signal(signum)
    code, out, err = finish(launcher)
    wait_for(lambda: not any(map(is_running, pids)), *pids)
    assert time.monotonic() - began < 10.0
    if signum != signal.SIGKILL:
        assert (code, err) == (128 + signum, "")
        assert f"stopped by {signum.name}" in out


def test_a_server_that_dies_ends_the_run_in_words(tmp_path: Path) -> None:
    began = time.monotonic()
    code, out, err = run(tmp_path, *FOREVER, STEP_SECONDS="0.01", SIGNAL=f"1:{int(signal.SIGKILL)}")
    assert code == 1
    assert time.monotonic() - began < 20.0
    pid = re.findall(r"process (\d+)", out)[1]
    assert " run failed: server 1 " in err
    assert re.search(rf"server 1 \(host \S+, process {pid}\) was killed by SIGKILL: out of memory", err)
    assert f"log: {tmp_path / 'run' / 'logs' / 'server1.log'}" in err or "log: run/logs/server1.log" in err
    assert len(rows_of(tmp_path / "run")) >= 3


# -- workers that die -----------------------------------------------------------------------------------------


def test_the_others_go_on_when_workers_die(tmp_path: Path) -> None:
    """Two at once, one of which writes the metrics; nobody hears of it before the evaluation."""
    four = ("parallel.data=4", "train.global_batch_size=8", "train.steps=40", "train.eval_every=20")
    code, out, err = run(tmp_path, *four, STEP_SECONDS="0.02", DEATHS="0:6 2:7")
    assert code == 0, err
    (told,) = json.loads((tmp_path / "run" / deaths.FILE).read_text())
    assert told["replicas"] == [0, 2]
    now, then = (line for line in err.splitlines() if "replicas 0, 2 died: rank 0 (data 0) was killed by" in line)
    assert now.endswith("; the others go on")
    start = told["first_step_without"]
    assert 2 <= start <= 8
    assert f"from step {start}, {(40 - start + 1) * 2 * 2} samples of their share were not trained on" in then
    last = rows_of(tmp_path / "run")[-1]
    assert (last["step"], last["tokens"]) == (40, 2 * 2)
    assert "done: 40 steps" in out


@pytest.mark.long
def test_a_run_without_workers_has_failed(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, "train.steps=40", STEP_SECONDS="0.05", DEATHS="1:6 0:25")
    assert code == 1
    assert "colossus: replica 1 died: rank 1 (data 1) was killed by SIGKILL" in err
    assert "the run could not go on after a death: no other replica is left" in err
    assert "run failed: rank 0" in err


@pytest.mark.long
def test_the_last_one_goes_on_alone(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "train.steps=40", "checkpoint.every=20", STEP_SECONDS="0.02", DEATHS="0:6")
    assert code == 0, err
    assert [row["step"] for row in rows_of(tmp_path / "run")][-1] == 40
    assert "done: 40 steps" in out


@pytest.mark.long
def test_those_that_live_stop_after_the_same_step(tmp_path: Path) -> None:
    four = ("parallel.data=4", "train.global_batch_size=8", "checkpoint.every=1000")
    launcher = begin(tmp_path, *FOREVER, *four, STEP_SECONDS="0.01", DEATHS="1:5")
    wait_for(lambda: has_rows(launcher, tmp_path / "run", 80), launcher.pid)
    launcher.send_signal(signal.SIGTERM)
    code, out, err = finish(launcher)
    assert code == 143, err
    assert "replica 1 died" in err
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert f"the latest checkpoint is {saved.relative_to(tmp_path)}" in out
