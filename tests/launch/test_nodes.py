"""Several nodes, as launchers of one machine: how one ends is told to the others, at once and with the right code."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.launching import Process, children, finish, has_rows, is_running, rows_of, start_nodes, wait_for

Nodes = tuple[list[Process], Path]


@pytest.fixture
def long_run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """Two launchers of one rank each that are training, and their run folder."""
    launchers = start_nodes(tmp_path, "train.steps=100000", "train.eval_every=0", STEP_SECONDS="0.02")
    try:
        wait_for(lambda: any(tmp_path.glob("*/runs/*/metrics.jsonl")), *(node.pid for node in launchers))
        (folder,) = tmp_path.glob("*/runs/*")
        wait_for(lambda: has_rows(launchers[0], folder, 3), *(node.pid for node in launchers))
        yield launchers, folder
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.communicate()


def launcher_of(rank: int, launchers: list[Process]) -> Process:
    """The launcher whose worker is this rank."""
    for launcher in launchers:
        environ = Path(f"/proc/{children(launcher.pid)[0]}/environ")
        if f"RANK={rank}".encode() in environ.read_bytes().split(b"\0"):
            return launcher
    raise AssertionError(f"no rank {rank}")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_on_one_node_stops_all_with_its_code(long_run: Nodes, signum: signal.Signals) -> None:
    launchers, folder = long_run
    since = time.monotonic()
    launchers[1].send_signal(signum)
    ended = [finish(launcher) for launcher in launchers]
    assert time.monotonic() - since < 30, "it was told after a minute once"
    assert [(code, err) for code, _, err in ended] == [(128 + signum, "")] * 2
    steps = [row["step"] for row in rows_of(folder)]
    assert steps == list(range(1, len(steps) + 1))
    assert all(f"stopped by {signum.name}" in out for _, out, _ in ended)
    assert not (folder / "failures").exists()
