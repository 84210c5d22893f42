"""Parameter servers that a launcher starts beside the ranks; `helpers/launched/served.py` is what runs."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from helpers.launching import LAUNCH, Process, children, finish, has_rows, is_running, start, wait_for
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from colossus.launch.ends import AttemptEnd, NodeEnd, RankEnd
from colossus.launch.servers import describe_servers, servers_of_node

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
def test_a_server_that_dies_ends_the_run_in_words(tmp_path: Path) -> None:
    launcher = begin(tmp_path, *ASYNC, *FOREVER, STEP_SECONDS="0.01")
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
    assert re.search(rf"ServerGone: server 1 at \S+ \(process {server}\) is gone: ", err)
    assert not is_running(server)


# -- without processes ----------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 12))
def test_servers_are_spread_evenly(number: int, nnodes: int) -> None:
    nodes = [servers_of_node(node, number, nnodes) for node in range(nnodes)]
    assert [index for indices in nodes for index in indices] == list(range(number))
    sizes = [len(indices) for indices in nodes]
    assert len(sizes) == nnodes
    assert max(sizes) - min(sizes) <= 1


def test_where_servers_are_in_words() -> None:
    assert describe_servers(1, 1) == "1 process beside the workers"
    assert describe_servers(3, 2) == "3 processes beside the workers, on 2 of 2 nodes"


def test_how_a_node_has_ended_is_the_same_on_the_others() -> None:
    adapter = TypeAdapter(NodeEnd)
    rank = RankEnd(3, 1, kind="error", progress=[("data", 1, "all_reduce", "model.py:3", True)], time=7.25)
    mine = AttemptEnd({3: rank}, None, "server 2 (host a, process 5) was killed", folder=Path("run"))
    end = adapter.validate_json(adapter.dump_json(mine))
    assert (end.server, end.is_good, type(end)) == (mine.server, False, NodeEnd)
    assert (end.ranks[3].error, end.ranks[3].progress) == (rank.error, [["data", 1, "all_reduce", "model.py:3", True]])


# -- a worker that dies ---------------------------------------------------------------------------------------


def test_a_worker_that_dies_ends_the_run_and_its_servers(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, *ASYNC, "train.steps=400", STEP_SECONDS="0.02", DEATHS="1:6")
    assert code == 1
    assert "run failed: rank 1" in err
    assert "rank 1 (data 1) was killed by SIGKILL" in err
    pids = [int(pid) for pid in re.findall(r"127.0.0.1 \(process (\d+)\)", out)]
    assert len(pids) == 2
    assert not any(map(is_running, pids))
