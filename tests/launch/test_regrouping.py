"""Runs of several nodes that are restarted, go on with fewer nodes, and with more again."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
from helpers.host_faults import ENDLESS, differences, lose_and_take_back
from helpers.hosts import needs_hosts
from helpers.launching import (
    LAUNCH,
    TINY,
    children,
    finish,
    has_rows,
    rows_of,
    start,
    wait_for,
)
from helpers.ports import free_port
from helpers.restart_faults import CONFIG, restarts_of

from colossus.config import ConfigError, state_config
from colossus.launch.auto_plan import NodePlans, NodeRange
from colossus.launch.nodes import _seniority


@pytest.mark.long
def test_a_node_that_ends_the_run_ends_it_for_all(tmp_path: Path) -> None:
    """The same error comes again."""
    words = [*LAUNCH[:-1], str(CONFIG), "--run-dir", "run", "--max-restarts", "5"]
    nodes = ["--nnodes", "2", "--nproc", "1", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    launchers = [start([*words, *nodes], tmp_path, TROUBLES="raise@6 " * 3) for _ in range(2)]
    ended = [finish(launcher) for launcher in launchers]
    assert [code for code, _, _ in ended] == [1, 1]
    for _, _, err in ended:
        assert err.rstrip().endswith("no restart: rank 1 has raised the same error in step 6 before")
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2, 3, 4, 5]


# -- fewer and more -------------------------------------------------------------------------------------------


@needs_hosts
@pytest.mark.long
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_host_that_is_lost_is_done_without_and_taken_back(tmp_path: Path, in_memory: bool) -> None:
    problems = lose_and_take_back(tmp_path, in_memory=in_memory)
    assert not problems, "\n".join(problems)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.long
def test_a_node_that_no_plan_needs_waits_until_one_does(tmp_path: Path) -> None:
    """A batch of 4 does not divide by 3; when one of the three has gone, the spare takes its place."""
    port = free_port()
    words = [*LAUNCH, "--run-dir", str(tmp_path / "run"), *ENDLESS, "parallel.data=4", "--nproc", "1"]
    words += ["--nnodes", "1:4", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    launchers = [start(words, tmp_path, STEP_SECONDS="0.05")]
    wait_for(lambda: listens(port), launchers[0].pid)  # it holds the store, and is not the one that goes
    launchers += [start(words, tmp_path, STEP_SECONDS="0.05") for _ in range(2)]
    pids, folder = [launcher.pid for launcher in launchers], tmp_path / "run"
    wait_for(lambda: has_rows(launchers[0], folder, 12), *pids)
    have_ranks = [launcher for launcher in launchers if children(launcher.pid)]
    (spare,) = set(launchers) - set(have_ranks)
    assert len(have_ranks) == 2
    leaver = next(launcher for launcher in have_ranks if launcher is not launchers[0])
    for pid in (*children(leaver.pid), leaver.pid):
        os.kill(pid, signal.SIGKILL)
    leaver.communicate()
    remaining = [launcher for launcher in launchers if launcher is not leaver]
    wait_for(lambda: len(restarts_of(tmp_path)) == 1, *(launcher.pid for launcher in remaining))
    (row,) = restarts_of(tmp_path)
    wait_for(lambda: has_rows(remaining[0], folder, row["from_step"] + 5), *(launcher.pid for launcher in remaining))
    assert all(len(children(launcher.pid)) == 1 for launcher in remaining)
    spare.send_signal(signal.SIGINT)
    assert [finish(launcher)[0] for launcher in remaining] == [130, 130]
    assert differences(folder, tmp_path) == []


@pytest.mark.long
def test_a_node_that_is_told_to_end_leaves_and_the_run_goes_on(tmp_path: Path) -> None:
    port, folder = free_port(), tmp_path / "run"
    words = [*LAUNCH, "--run-dir", str(folder), *ENDLESS, "--nproc", "1", "--nnodes", "1:2"]
    words += ["--rdzv-endpoint", f"127.0.0.1:{port}"]
    stays = start(words, tmp_path, STEP_SECONDS="0.05")
    wait_for(lambda: listens(port), stays.pid)
    leaves = start(words, tmp_path, STEP_SECONDS="0.05")
    wait_for(lambda: has_rows(stays, folder, 12), stays.pid, leaves.pid)
    leaves.send_signal(signal.SIGTERM)
    code, out, _ = finish(leaves)
    assert (code, "stopped by SIGTERM after step" in out) == (143, True)
    wait_for(lambda: len(restarts_of(tmp_path)) == 1, stays.pid)
    (row,) = restarts_of(tmp_path)
    assert (row["cause"], row["steps_redone"]) == ("a node has left", 0)
    wait_for(lambda: has_rows(stays, folder, row["from_step"] + 5), stays.pid)
    stays.send_signal(signal.SIGTERM)  # it holds the meeting place: nobody can go on without it
    assert finish(stays)[0] == 143
    assert differences(folder, tmp_path) == []


# -- what is decided ------------------------------------------------------------------------------------------


def plans(nodes: tuple[int, int], *overrides: str, nproc: int | None = 1) -> NodePlans:
    keys = ["checkpoint.every=5", "launch.restarts=1", *overrides]
    return NodePlans(state_config(TINY, keys), nproc, NodeRange(*nodes), "host:29500")


def test_the_most_nodes_for_which_a_plan_fits_are_taken() -> None:
    fitted = plans((1, 4), "parallel.data=4")
    used = {number: fitted.plan(number) for number in (1, 2, 3, 4)}
    assert {number: nodes for number, (_, nodes) in used.items()} == {1: 1, 2: 2, 3: 2, 4: 4}
    assert [planned.config.parallel.data for planned, _ in used.values()] == [1, 2, 2, 4]
    assert {planned.config.train.global_batch_size for planned, _ in used.values()} == {4}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("launch.restarts=None", "--nnodes 1:2: a run continues with fewer nodes by a restart: set launch.restarts"),
        ("checkpoint.every=0", "--nnodes 1:2: a run continues with more nodes from a checkpoint: set checkpoint.every"),
        (
            "parallel.tensor=2 parallel.data=1",
            "tensor 2 = 2 does not divide 1 process, and only data may",
        ),
    ],
)
def test_a_range_that_cannot_be_is_refused(overrides: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plans((1, 2), *overrides.split())


def test_those_that_were_there_come_first_in_their_order() -> None:
    before = [None, 1, None, 0]
    assert sorted(range(4), key=lambda place: _seniority(before[place], place)) == [3, 1, 0, 2]
