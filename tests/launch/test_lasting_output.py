"""A run goes on, saves and ends as it should when nobody reads what it prints; with -m long in a real shell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.forked import ForkedPython
from helpers.launching import LAUNCH, TINY, environment, finish

from colossus.checkpoint.folder import find_latest

WORDS = ["--run-dir", "run", "parallel.data=1", "train.log_every=1", "checkpoint.every=100", "train.eval_every=0"]
RUN = f"{sys.executable} -m colossus launch {TINY} {' '.join(WORDS)}"


def in_shell(command: str, cwd: Path, **more: str) -> subprocess.Popen[str]:
    """A pipeline in a process group of its own, in which SIGINT has its default action."""
    return subprocess.Popen(
        ["bash", "-c", command],
        cwd=cwd,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def saved_step(cwd: Path) -> str:
    latest = find_latest(cwd / "run" / "checkpoints")
    return latest.name if latest is not None else "none"


@pytest.mark.parametrize("stops", [False, True])
def test_a_reader_that_goes_is_not_missed(stops: bool, tmp_path: Path) -> None:
    """It ends by itself; or with Ctrl-C, which also ends a ``tee``, it saves."""
    reads, writes = os.pipe()
    more = ["train.steps=5000"] if stops else []
    env = environment(STEP_SECONDS="0.05" if stops else "0")
    run = ForkedPython([*LAUNCH, *WORDS, *more], env=env, cwd=tmp_path, outputs=(writes, writes))
    os.close(writes)
    with os.fdopen(reads) as output:
        while stops and "step 3/" not in output.readline():
            assert run.poll() is None
        output.readline()
    if stops:
        run.send_signal(signal.SIGINT)
    assert run.wait(60) == (130 if stops else 0)
    assert saved_step(tmp_path) != "none" if stops else saved_step(tmp_path) == "step-00000005"


@pytest.mark.long
@pytest.mark.parametrize("output", ["2>&1 | head -2", "> /dev/full", ">&- 2>&-"])
def test_a_run_trains_to_its_end(output: str, tmp_path: Path) -> None:
    code, out, err = finish(in_shell(f"{RUN} {output}; exit ${{PIPESTATUS[0]}}", tmp_path))
    assert (code, saved_step(tmp_path)) == (0, "step-00000005"), out + err
    assert "Traceback" not in out + err
    assert "Exception ignored" not in out + err


@pytest.mark.long
def test_a_ctrl_c_that_kills_tee_too_saves(tmp_path: Path) -> None:
    shell = in_shell(
        f"{RUN} train.steps=5000 2>&1 | tee log; echo code ${{PIPESTATUS[0]}} > code", tmp_path, STEP_SECONDS="0.05"
    )
    log = tmp_path / "log"
    while not (log.exists() and "step 3/" in log.read_text()):
        assert shell.poll() is None, shell.communicate()
        time.sleep(0.05)
    pids = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(shell.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    for pid in pids:  # all but the shell, which is to write the code down
        os.kill(int(pid), signal.SIGINT)
    finish(shell)
    assert (tmp_path / "code").read_text() == "code 130\n"
    assert saved_step(tmp_path) != "none"
