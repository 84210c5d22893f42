"""Several hosts: launchers with networks, mounts and processes of their own, which meet over the network alone."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.forked import ForkedPython
from helpers.hosts import needs_hosts, start_on
from helpers.launching import children, finish, has_rows, launch, rows_of, wait_for
from helpers.long import long

from benchmarks.hosts import Host, make_hosts

Nodes = tuple[list[ForkedPython], Path]
EXACT = "train.precision=fp64"
OTHER_PLANS = (
    "data=2 tensor=2",
    "data=4 strategy=hierarchical",
    "data=2 strategy=dict(type='sgp',graph='complete',log_every=1)",
)


@pytest.fixture
def two_hosts() -> Iterator[list[Host]]:
    """As Debian makes them: their own names mean 127.0.1.1."""
    with make_hosts(2, own_name_is="127.0.1.1") as hosts:
        yield hosts


@pytest.fixture
def long_run(two_hosts: list[Host], tmp_path: Path) -> Iterator[Nodes]:
    """Launchers of one rank each on two hosts that are training, and their run folder."""
    arguments = ("--run-dir", "run", "train.steps=100000", "train.eval_every=0")
    launchers = start_on(two_hosts, tmp_path, *arguments, STEP_SECONDS="0.02")
    try:
        pids = [launcher.pid for launcher in launchers]
        wait_for(lambda: any(has_rows(launcher, tmp_path / "run", 3) for launcher in launchers), *pids)
        yield launchers, tmp_path / "run"
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.communicate()


# -- runs -----------------------------------------------------------------------------------------------------


@needs_hosts
@pytest.mark.parametrize("plan", ["data=2", *long(*OTHER_PLANS)])
def test_a_run_on_two_hosts_is_that_of_one(two_hosts: list[Host], tmp_path: Path, plan: str) -> None:
    overrides = [f"parallel.{part}" for part in plan.split()]
    launchers = start_on(two_hosts, tmp_path, "--run-dir", "run", EXACT, *overrides)
    ended = [finish(launcher) for launcher in launchers]
    assert [(code, err) for code, _, err in ended] == [(0, "")] * 2
    assert sum("done: 5 steps" in out for _, out, _ in ended) == 1
    rows = rows_of(tmp_path / "run")
    code, _, err = launch(tmp_path, "--run-dir", "alone", "parallel.data=1", EXACT)
    assert (code, err) == (0, "")
    alone = rows_of(tmp_path / "alone")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for name in ("loss", "validation_loss"):
        wanted = [row[name] for row in alone if name in row and "loss" in row]
        assert [row[name] for row in rows if name in row] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.long
@needs_hosts
def test_a_death_on_one_host_is_reported_on_both(long_run: Nodes) -> None:
    launchers, folder = long_run
    of_host = {str(index): children(launcher.pid)[0] for index, launcher in enumerate(launchers)}
    os.kill(of_host["1"], signal.SIGKILL)
    ended = [finish(launcher) for launcher in launchers]
    assert [code for code, _, _ in ended] == [1, 1]
    both = "".join(err for _, _, err in ended)
    (killed,) = set(re.findall(r"rank (\d) \(data \d\) was killed by SIGKILL", both))
    assert both.count(f"run failed: rank {killed} near step") == 1
    assert both.count("was killed by SIGKILL") == 2
    assert f"rank {1 - int(killed)} stopped because rank {killed} went away." in both
    assert "SIGKILL" in (folder / "attempts.jsonl").read_text()


@needs_hosts
@pytest.mark.long
@pytest.mark.parametrize("signum", [None, signal.SIGKILL])
def test_each_host_has_a_parameter_server(two_hosts: list[Host], tmp_path: Path, signum: signal.Signals | None) -> None:
    """One is killed by a rank of its own host; both launchers name it."""
    config = Path(__file__).parents[1] / "helpers" / "launched" / "served.py"
    arguments = ["--run-dir", "run", "parallel.strategy.servers=None"]
    if signum is not None:
        arguments += ["train.steps=100000", "train.eval_every=0"]
    killed = {"SIGNAL": f"0:{int(signum)}", "STEP_SECONDS": "0.02"} if signum is not None else {}
    launchers = start_on(two_hosts, tmp_path, *arguments, config=config, **killed)
    ended = [finish(launcher) for launcher in launchers]
    out, err = ("".join(texts) for texts in ([each[1] for each in ended], [each[2] for each in ended]))
    places = re.findall(r"(10\.\S+) \(process (\d+)\)", out)
    assert sorted(address for address, _ in places) == sorted(host.address for host in two_hosts)
    if signum is None:
        assert [(code, error) for code, _, error in ended] == [(0, "")] * 2
    else:
        assert [code for code, _, _ in ended] == [1, 1]
        assert len(re.findall(rf"server 0 \(host \S+, process {places[0][1]}\) was killed by SIGKILL", err)) == 2
