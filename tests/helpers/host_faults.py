"""Two hosts of one run, of which one loses its power and comes back."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from helpers.hosts import connect, launch_on, lose_power, start_on
from helpers.launching import TINY, finish, has_rows, launch, rows_of, wait_for
from helpers.restart_faults import restarts_of

from benchmarks.hosts import launch_words, make_hosts

#: a run that goes on with one node or more until it is stopped
ENDLESS = (
    *("--max-restarts", "3", "launch.rejoin_seconds=1", "train.steps=100000", "train.eval_every=0"),
    *("train.precision=fp64", "checkpoint.every=5"),
)
#: what a save of the disk is not needed for
IN_MEMORY = ("checkpoint.every=1000", "checkpoint.memory_every=1", "checkpoint.memory_copies=2")


def lose_and_take_back(folder: Path, *, in_memory: bool) -> list[str]:
    """The second host is lost; the run goes on with the first, and with both when it is back; then it is stopped.

    Args:
        in_memory: what the lost host has saved is taken from the memory of the other; else all from the disk.

    Returns:
        What is not as it should be, in words.
    """
    step, run = {"STEP_SECONDS": "0.05"}, folder / "run"
    arguments = ("--run-dir", "run", "--nnodes", "1:2", *ENDLESS, *(IN_MEMORY if in_memory else ()))
    with make_hosts(2) as hosts:
        launchers = start_on(hosts, folder, *arguments, **step)
        try:
            wait_for(lambda: has_rows(launchers[0], run, 12), *(launcher.pid for launcher in launchers))
            stays, lost = launchers
            lose_power(hosts[1], lost)
            wait_for(lambda: len(restarts_of(folder)) == 1 and has_rows(stays, run, 12), stays.pid)
            connect(hosts[1])
            back = launch_on(hosts[1], launch_words(hosts, [str(TINY), *arguments]), folder, **step)
            launchers.append(back)
            wait_for(lambda: len(restarts_of(folder)) == 2 or back.poll() is not None, stays.pid, back.pid)
            first, second = restarts_of(folder)
            wait_for(lambda: has_rows(stays, run, second["from_step"] + 5), stays.pid, back.pid)
            back.send_signal(signal.SIGINT)
            ended = [finish(stays), finish(back)]
        finally:  # a namespace ends when its processes have been waited for
            for launcher in launchers:
                launcher.kill()
                launcher.communicate()
    problems = []
    if [code for code, _, _ in ended] != [130, 130]:
        problems.append(f"exit codes {[code for code, _, _ in ended]}")
    if not (first["cause"].startswith("node ") and first["cause"].endswith(" has gone")):
        problems.append(f"the cause is said to be {first['cause']!r}")
    if (second["cause"], second["steps_redone"]) != ("more nodes are there", 0):
        problems.append(f"the second restart is {second}")
    where = "/dev/shm/colossus-memory-" if in_memory else str(run)
    if f"restarted after step {first['from_step']}, from {where}" not in ended[0][2]:
        problems.append("the run did not go on from where it should")
    problems += differences(run, folder)
    return [*problems, "".join(out + err for _, out, err in ended)] if problems else []


def differences(run: Path, folder: Path) -> list[str]:
    """Between the rows of a run that has ended somewhere, and those of one process that was never disturbed."""
    rows = rows_of(run)
    keys = [f"train.steps={len(rows)}", "parallel.data=1", "train.eval_every=0", "train.precision=fp64"]
    code, _, err = launch(folder, "--run-dir", "alone", *keys)
    alone = rows_of(folder / "alone")
    if code or [row["step"] for row in rows] != [row["step"] for row in alone]:
        return [f"steps {[row['step'] for row in rows]}; alone exit code {code}, {err}"]
    return [
        f"{name} differs from that of the undisturbed run"
        for name in ("loss", "grad_norm")
        if [row[name] for row in rows] != pytest.approx([row[name] for row in alone], rel=1e-10)
    ]
