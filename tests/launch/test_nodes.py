"""Several nodes, as launchers of one machine: how one ends is told to the others, at once and with the right code."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.launching import (
    Process,
    children,
    failed_ranks,
    finish,
    has_rows,
    is_running,
    rows_of,
    start_nodes,
    wait_for,
)
from helpers.long import long

from colossus.launch import run_folder

Nodes = tuple[list[Process], Path]


@pytest.fixture
def long_run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """Two launchers of one rank each that are training, and their run folder."""
    launchers = start_nodes(tmp_path, "train.steps=100000", "train.eval_every=0", STEP_SECONDS="0.02")
    try:
        folder = folder_of(tmp_path, launchers)
        wait_for(lambda: has_rows(launchers[0], folder, 3), *(node.pid for node in launchers))
        yield launchers, folder
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.communicate()


def folder_of(tmp_path: Path, launchers: list[Process]) -> Path:
    """The run folder, once it has metrics."""
    wait_for(lambda: any(tmp_path.glob("*/runs/*/metrics.jsonl")), *(launcher.pid for launcher in launchers))
    (folder,) = tmp_path.glob("*/runs/*")
    return folder


def process_of(rank: int, launchers: list[Process], folder: Path) -> int:
    """The process of a rank; the launcher of rank 0 has made the run folder."""
    first = int(folder.parents[1].name)
    (pid,) = children(launchers[first if rank == 0 else 1 - first].pid)
    return pid


def lines_of(err: str) -> list[str]:
    """What colossus itself says; without what only a busy machine makes it say, and torch of connections that end."""
    own = [line for line in err.splitlines() if line.startswith(("colossus:", "run failed"))]
    assert "Traceback" not in err
    return [line for line in own if "waiting at" not in line]


@pytest.mark.parametrize("signum", [signal.SIGTERM, *long(signal.SIGINT)])
def test_a_stop_on_one_node_stops_all_with_its_code(long_run: Nodes, signum: signal.Signals) -> None:
    launchers, folder = long_run
    launchers[1].send_signal(signum)
    ended = [finish(launcher) for launcher in launchers]
    assert [code for code, _, _ in ended] == [128 + signum] * 2
    assert [lines_of(err) for _, _, err in ended] == [[], []]
    steps = [row["step"] for row in rows_of(folder)]
    assert steps == list(range(1, len(steps) + 1))
    assert all(f"stopped by {signum.name}" in out for _, out, _ in ended)
    assert not failed_ranks(folder)


# the first holds the store they speak through; of the other it takes some signs of life to be missed
@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.rest("0")
def test_a_killed_launcher_is_named_by_the_other_node(long_run: Nodes, killed: int) -> None:
    launchers, _ = long_run
    victim, other = launchers[killed], launchers[1 - killed]
    ranks = children(victim.pid)
    victim.kill()
    code, _, err = finish(other)
    assert code == 1, err
    assert re.search(r"run failed: node \d has gone", err)
    assert re.search(r"node \d \(host .*; rank \d\) gives no sign of life", err)
    wait_for(lambda: not any(is_running(rank) for rank in ranks), *ranks)


def test_a_killed_rank_is_named_on_all_nodes(long_run: Nodes) -> None:
    launchers, folder = long_run
    os.kill(process_of(1, launchers, folder), signal.SIGKILL)
    ended = [finish(launcher) for launcher in launchers]
    assert [code for code, _, _ in ended] == [1, 1]
    both = "".join(err for _, _, err in ended)
    assert both.count("run failed: rank 1 near step") == 1
    assert both.count("rank 1 (data 1) was killed by SIGKILL") == 2
    assert both.count("rank 0 stopped because rank 1 went away.") == 1


@pytest.mark.long
@pytest.mark.usefixtures("short_grace")
def test_ranks_that_do_not_communicate_end_with_the_other_node(tmp_path: Path) -> None:
    launchers = start_nodes(tmp_path, "comm.timeout_seconds=600", TROUBLE="hang", TROUBLED_RANK="0")
    pids = [launcher.pid for launcher in launchers]
    folder = folder_of(tmp_path, launchers)
    wait_for(lambda: has_rows(launchers[0], folder, 2), *pids)
    os.kill(process_of(1, launchers, folder), signal.SIGKILL)
    ended = [finish(launcher) for launcher in launchers]
    assert [code for code, _, _ in ended] == [1, 1]
    assert all("rank 1 (data 1) was killed by SIGKILL" in err for _, _, err in ended)


def test_two_nodes_train_to_the_end_or_none_begins(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    ended = [finish(launcher) for launcher in start_nodes(tmp_path, "--run-dir", run)]
    assert [(code, lines_of(err)) for code, _, err in ended] == [(0, [])] * 2
    assert sum("done: 5 steps" in out for _, out, _ in ended) == 1
    assert [row["step"] for row in rows_of(Path(run))] == [1, 2, 3, 4, 5]


@pytest.mark.long
def test_a_folder_in_use_is_refused_on_all_nodes(tmp_path: Path) -> None:
    """Only the first node, which makes the folder, sees who has locked it."""
    with run_folder.prepare(tmp_path / "run"):
        ended = [finish(launcher) for launcher in start_nodes(tmp_path, "--run-dir", str(tmp_path / "run"))]
    assert [code for code, _, _ in ended] == [2, 2]
    for _, _, err in ended:
        (line,) = lines_of(err)
        assert "another run is using it now" in line
