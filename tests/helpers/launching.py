"""``colossus launch`` as a process of its own, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.forked import ForkedPython
from helpers.ports import free_port

from colossus.context.local_ranks import StallDetector
from colossus.launch import attempt_log
from colossus.launch.ends import RankEnd, failed

ROOT = Path(__file__).parents[2]
TINY = Path(__file__).parent / "launched" / "tiny.py"
LAUNCH = [sys.executable, "-m", "colossus", "launch", str(TINY)]
PATIENCE = 60.0
"""Seconds in which nothing moves, after which a run is taken for hung."""
#: either can be waited for, signalled and read
Process = subprocess.Popen[str] | ForkedPython
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(**more: str) -> dict[str, str]:
    variables = {key: value for key, value in os.environ.items() if key not in FOREIGN and not key.startswith("SLURM")}
    return {**variables, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def start(
    command_line: list[str], cwd: Path, *, new_python: bool = False, new_session: bool = False, **more: str
) -> Process:
    """``command_line`` as a process of its own: forked, see `ForkedPython`, or in a new Python."""
    if not new_python:
        return ForkedPython(command_line, env=environment(**more), cwd=cwd, pipes=True, start_new_session=new_session)

    def default_signals() -> None:
        # a test runner in the background has SIGINT ignored, which children would inherit
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(
        command_line,
        cwd=cwd,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_signals,
    )


def finish(process: Process) -> tuple[int, str, str]:
    """(exit code, standard output, standard error), however long it takes: as long as it does anything."""
    stall = StallDetector([process.pid], PATIENCE)
    while True:
        try:
            out, err = process.communicate(timeout=2.0)
            return process.returncode, out, err
        except subprocess.TimeoutExpired:
            if stall.is_stalled():
                process.kill()
                raise


def launch(tmp_path: Path, *arguments: str, new_python: bool = False, **more: str) -> tuple[int, str, str]:
    return finish(start([*LAUNCH, "--run-dir", "run", *arguments], tmp_path, new_python=new_python, **more))


def start_nodes(tmp_path: Path, *arguments: str, nodes: int = 2, started: int = 2, **more: str) -> list[Process]:
    """Launchers of one run, each with one rank, in folders of their own as if they were on machines of their own."""
    options = ["--nnodes", str(nodes), "--nproc", "1", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    launchers = []
    for node in range(started):
        (tmp_path / str(node)).mkdir()
        launchers.append(start([*LAUNCH, *options, *arguments], tmp_path / str(node), **more))
    return launchers


def start_slurm_tasks(tmp_path: Path, *arguments: str, **more: str) -> list[Process]:
    """What srun starts for a job step of two tasks."""
    variables = {
        "SLURM_NTASKS": "2",
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_TASKS_PER_NODE": "2",
        "MASTER_PORT": str(free_port()),
        **more,
    }
    return [
        start([*LAUNCH, *arguments], tmp_path, **variables, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
        for rank in range(2)
    ]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def failed_ranks(folder: Path) -> list[RankEnd]:
    """The ranks that failed in the last attempt, the most likely culprit first."""
    attempts = attempt_log.read(folder)
    return failed(attempts[max(attempts)]["ranks"]) if attempts else []


def has_rows(process: Process, folder: Path, number: int) -> bool:
    if process.poll() is not None:
        pytest.fail(f"the run ended by itself: {finish(process)}")
    return (folder / "metrics.jsonl").exists() and len(rows_of(folder)) >= number


def wait_for(condition: Callable[[], bool], *pids: int) -> None:
    """Wait as long as these processes do anything."""
    stall = StallDetector(pids, PATIENCE)
    while not condition():
        assert not stall.is_stalled(), f"nothing has moved for {PATIENCE:.0f} s"
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    if not listed.exists():
        pytest.skip("needs /proc to find the ranks' processes")
    return [int(word) for word in listed.read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
