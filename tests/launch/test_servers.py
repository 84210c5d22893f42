"""Parameter servers that a launcher starts beside the ranks; `helpers/launched/served.py` is what runs."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
from helpers.launching import LAUNCH, Process, children, finish, has_rows, is_running, rows_of, start, wait_for
from hypothesis import given
from hypothesis import strategies as st

from colossus.launch import deaths, failure
from colossus.launch.failure import FailureRecord
from colossus.launch.server_failure import ServerFailure, silent_server
from colossus.launch.server_plan import describe_servers, servers_of_nodes
from colossus.server.messages import ServerGone

CONFIG = Path(__file__).parents[1] / "helpers" / "launched" / "served.py"
SHARED_MEMORY = Path("/dev/shm")
ASYNC = (
    "parallel.strategy.type=server",
    "parallel.strategy.mode=async",
    "parallel.strategy.servers=2",
    "optimizer.lr=0.02",
)
FOUR = ("parallel.data=4", "train.global_batch_size=8")
FOREVER = ("train.steps=100000", "train.eval_every=0")


def begin(folder: Path, *arguments: str, **variables: str) -> Process:
    return start([*LAUNCH[:-1], str(CONFIG), "--run-dir", "run", *arguments], folder, **variables)


def run(folder: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
    return finish(begin(folder, *arguments, **variables))


def is_server(pid: int, index: int) -> bool:
    """By the file that it prints to."""
    return os.readlink(f"/proc/{pid}/fd/1").endswith(f"server{index}.log")


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_launcher(tmp_path: Path, signum: signal.Signals) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    launcher = begin(tmp_path, *ASYNC, *FOREVER, STEP_SECONDS="0.01", TMPDIR=str(temporary))
    wait_for(lambda: has_rows(launcher, tmp_path / "run", 3), launcher.pid)
    pids = children(launcher.pid)
    assert len(pids) == 4
    began = time.monotonic()
    launcher.send_signal(signum)
    code, out, err = finish(launcher)
    wait_for(lambda: not any(map(is_running, pids)), *pids)
    assert time.monotonic() - began < 10.0
    if signum != signal.SIGKILL:
        assert (code, err) == (128 + signum, "")
        assert f"stopped by {signum.name}" in out
    assert left_in(temporary) == set()
    assert not any(name.startswith(f"colossus-{pid}-") for name in left_in(SHARED_MEMORY) for pid in pids)


@pytest.mark.long
@pytest.mark.parametrize("on_death", ["continue", "stop"])
def test_a_server_that_dies_ends_the_run_in_words(tmp_path: Path, on_death: str) -> None:
    """Whatever may become of workers: the others cannot do without it."""
    launcher = begin(tmp_path, *ASYNC, *FOREVER, f"parallel.strategy.on_death={on_death}", STEP_SECONDS="0.01")
    wait_for(lambda: has_rows(launcher, tmp_path / "run", 3), launcher.pid)
    server = next(pid for pid in children(launcher.pid) if is_server(pid, 1))
    began = time.monotonic()
    os.kill(server, signal.SIGKILL)
    code, _, err = finish(launcher)
    assert code == 1
    assert time.monotonic() - began < 10.0
    assert " run failed: server 1 " in err
    assert re.search(rf"server 1 \(host \S+, process {server}\) was killed by SIGKILL: out of memory", err)
    assert "log: run/logs/server1.log" in err
    assert err.count("=====") < 50  # no second block
    assert not any(name.startswith(f"colossus-{server}-") for name in left_in(SHARED_MEMORY))


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_server_that_hangs_is_named_after_a_while(tmp_path: Path, mode: str) -> None:
    launcher = begin(
        tmp_path, *ASYNC, f"parallel.strategy.mode={mode}", *FOREVER, "comm.timeout_seconds=6", STEP_SECONDS="0.01"
    )
    wait_for(lambda: has_rows(launcher, tmp_path / "run", 3), launcher.pid)
    server = next(pid for pid in children(launcher.pid) if is_server(pid, 1))
    os.kill(server, signal.SIGSTOP)
    code, _, err = finish(launcher)
    assert code == 1
    assert re.search(rf"server 1 \(host \S+, process {server}\) lives, but gives no sign of it", err)
    assert "a worker said:" in err
    assert not is_running(server)


# -- without processes ----------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 12))
def test_servers_are_spread_evenly(number: int, nnodes: int) -> None:
    nodes = servers_of_nodes(number, nnodes)
    assert [index for indices in nodes for index in indices] == list(range(number))
    sizes = [len(indices) for indices in nodes]
    assert len(sizes) == nnodes
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("number", "nnodes", "words"),
    [
        (1, 1, "1 process beside the workers"),
        (4, 4, "4 processes beside the workers, one on each of 4 nodes"),
        (3, 2, "3 processes beside the workers, 2, 1 on the 2 nodes"),
    ],
)
def test_where_servers_are_in_words(number: int, nnodes: int, words: str) -> None:
    assert describe_servers(number, nnodes) == words


def failed(rank: int, server: int | None, kind: failure.Kind = "communication", at: float = 1.0) -> FailureRecord:
    return FailureRecord(rank, kind, "ServerGone", f"server {server} is gone", "", server=server, time=at)


def test_the_server_that_workers_blame_first_is_named() -> None:
    endpoints = [{"host": f"10.0.0.{index}", "process": 70 + index} for index in range(2)]
    found = silent_server([failed(0, 0, at=3.0), failed(1, 1, at=2.0), failed(2, None, at=1.0)], endpoints)
    assert found is not None
    assert found.name == "server 1 (host 10.0.0.1, process 71)"
    assert "rank 1: server 1 is gone" in found.block(None)
    assert silent_server([failed(0, None)], endpoints) is None
    assert silent_server([failed(0, 7)], endpoints) is None  # of another run
    assert ServerFailure.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "was killed by SIGKILL: out of memory is the most likely"),
        (1, "ended with exit code 1"),
        (0, "ended before the workers had, as if it had been told to"),
        (143, "ended before the workers had, as if it had been told to"),
        (None, "lives, but gives no sign of it"),
    ],
)
def test_how_a_server_ended_in_words(code: int | None, words: str) -> None:
    block = ServerFailure(2, "a", 5, code, "last words", "logs/server2.log").block(Path("run"))
    assert f"server 2 (host a, process 5) {words}" in block
    assert "last words" in block
    assert "run folder: run" in block


def test_who_loses_a_server_is_a_victim_that_names_it() -> None:
    error = RuntimeError("a step has failed")
    error.__cause__ = ServerGone(1, "10.0.0.1:7", "it was silent")
    record = failure.of_exception(error, 3)
    assert (record.kind, record.server) == ("communication", 1)


# -- workers that die -----------------------------------------------------------------------------------------


def test_the_others_go_on_when_workers_die(tmp_path: Path) -> None:
    """Two at once, one of which writes the metrics; nobody hears of it before the evaluation."""
    steps = ("train.steps=40", "train.eval_every=20")
    code, out, err = run(tmp_path, *ASYNC, *FOUR, *steps, STEP_SECONDS="0.02", DEATHS="0:6 2:7")
    assert code == 0, err
    (told,) = json.loads((tmp_path / "run" / deaths.FILE).read_text())
    assert told["replicas"] == [0, 2]
    now, then = (line for line in err.splitlines() if "replicas 0, 2 died: rank 0 (data 0) was killed by" in line)
    assert now.endswith("; the others go on")
    start = told["first_step_without"]
    assert 2 <= start <= 8
    assert (
        f"from about step {start}, about {(40 - start + 1) * 2 * 2} samples of their share were not trained on" in then
    )
    rows = rows_of(tmp_path / "run")
    assert (rows[-1]["step"], rows[-1]["tokens"]) == (40, 2 * 2)
    assert rows[-1]["validation_loss"] < 0.1 < rows[0]["loss"]
    assert "done: 40 steps" in out
    pids = [int(pid) for pid in re.findall(r"127.0.0.1 \(process (\d+)\)", out)]
    assert len(pids) == 2
    assert not any(map(is_running, pids))
    assert left_in(tmp_path / "run" / "logs") == {"server0.log", "server1.log"}
    assert not any(name.startswith(f"colossus-{pid}-") for name in left_in(SHARED_MEMORY) for pid in pids)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_a_worker_may_die_at_any_moment(tmp_path: Path, seed: int) -> None:
    """But for what all do together, and before all have trained a step."""
    generator = random.Random(seed)
    algorithm = generator.choice(["sgd", "downpour", "easgd"])
    rank, seconds = generator.randrange(4), generator.random()
    code, out, err = run(
        tmp_path,
        *(*ASYNC, *FOUR, f"parallel.strategy.algorithm={algorithm}", "train.steps=200", "train.eval_every=200"),
        STEP_SECONDS="0.01",
        KILLED=f"{rank}:{seconds}",
    )
    assert code == 0, err
    assert f"colossus: replica {rank} died: rank {rank} (data {rank}) was killed by SIGKILL" in err
    assert "done: 200 steps" in out
    assert rows_of(tmp_path / "run")[-1]["tokens"] == 3 * 2


@pytest.mark.long
def test_a_replica_of_several_ranks_goes_as_a_whole(tmp_path: Path) -> None:
    plan = ("parallel.data=3", "parallel.tensor=2", "train.global_batch_size=6", "train.steps=40")
    code, _, err = run(tmp_path, *ASYNC, *plan, "train.eval_every=20", STEP_SECONDS="0.02", DEATHS="3:6")
    assert code == 0, err
    (told,) = json.loads((tmp_path / "run" / deaths.FILE).read_text())
    assert (told["replicas"], told["ranks"]) == ([1], [2, 3])


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
