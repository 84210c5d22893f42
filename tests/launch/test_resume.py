"""Launched runs that are stopped, killed, requeued and resumed: what they leave, and how they go on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.launching import (
    LAUNCH,
    Process,
    children,
    failed_ranks,
    finish,
    has_rows,
    is_running,
    launch,
    rows_of,
    start,
    start_slurm_tasks,
    wait_for,
)

from colossus.launch import local_processes, stop

#: of a row, what depends on the run and not on the machine
NUMBERS = ("step", "loss", "grad_norm", "lr", "tokens", "validation_loss")
SLOW = {"STEP_SECONDS": "0.05"}


def numbers(folder: Path) -> list[dict[str, Any]]:
    return [{key: row[key] for key in NUMBERS if key in row} for row in rows_of(folder)]


def stop_at(process: Process, folder: Path, rows: int, signum: int) -> tuple[int, str, str]:
    wait_for(lambda: has_rows(process, folder, rows), process.pid)
    process.send_signal(signum)
    return finish(process)


@pytest.mark.long
def test_a_stop_waits_for_a_slow_disk_but_not_for_a_stuck_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "GRACE_SECONDS", 0.5)  # of the forked launcher and ranks, too
    monkeypatch.setattr(local_processes, "KILL_SECONDS", 1.0)
    monkeypatch.setattr(local_processes, "SAY_SECONDS", 0.5)
    command = [*LAUNCH, "--run-dir", "run", "train.steps=100000", "checkpoint.every=50000"]
    code, out, err = stop_at(start(command, tmp_path, **SLOW, TROUBLE="slow disk"), tmp_path / "run", 1, signal.SIGTERM)
    saved = rows_of(tmp_path / "run")[-1]["step"]
    assert code == 143, out + err
    assert f"the latest checkpoint is run/checkpoints/step-{saved:08d}" in out
    assert err.startswith("colossus: waiting for the running step to end and its checkpoint to be saved (Ctrl-C again")

    command = [*LAUNCH, "--run-dir", "hung", "checkpoint.every=2", "checkpoint.grace_seconds=1"]
    code, out, err = stop_at(start(command, tmp_path, TROUBLE="hang"), tmp_path / "hung", 2, signal.SIGTERM)
    assert code == 1, out + err
    assert "stopped by SIGTERM after step 2" in out
    assert "did not reach the end of its step within 1 s and was ended" in err
    assert "the latest checkpoint is hung/checkpoints/step-00000002, " in out
    assert "stuck" in {record.kind for record in failed_ranks(tmp_path / "hung")}


def test_a_stop_whose_save_cannot_be_complete_is_a_failure(tmp_path: Path) -> None:
    command = [*LAUNCH, "--run-dir", "run", "train.steps=100000", "checkpoint.every=50000"]
    process = start(command, tmp_path, **SLOW, TROUBLE="slow disk")
    wait_for(lambda: has_rows(process, tmp_path / "run", 1), process.pid)
    ranks = children(process.pid)
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: any((tmp_path / "run" / "checkpoints").glob("step-*")), process.pid)
    os.kill(ranks[0], signal.SIGKILL)
    code, out, err = finish(process)
    assert code == 1, out + err
    assert "stopped by SIGTERM after step" in out
    assert "no checkpoint was saved" in out
    assert "SIGKILL" in err, err


@pytest.mark.long
def test_a_rank_whose_launcher_is_killed_while_it_loads_leaves_the_run_alone(tmp_path: Path) -> None:
    run, steps = tmp_path / "run", ["parallel.data=1", "checkpoint.every=2", "train.steps=5"]
    assert launch(tmp_path, *steps)[0] == 0
    rows = (run / "metrics.jsonl").read_bytes()
    arguments = ["--resume", "--run-dir", "run", *steps, "train.steps=100000"]
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 6}\n')  # as if another attempt had gone on meanwhile
    process = start([*LAUNCH, *arguments], tmp_path, TROUBLE="slow load")
    wait_for((tmp_path / "loading").exists, process.pid)
    (rank,) = children(process.pid)
    os.kill(rank, signal.SIGSTOP)  # else it has ended before the next launch looks
    os.kill(process.pid, signal.SIGKILL)
    code, _, err = launch(tmp_path, *arguments[3:], "--resume")
    assert (code, "the ranks of a launcher that was killed are still there" in err) == (2, True), err
    loaded = (tmp_path / "loading").stat().st_mtime + 2.0  # it has nothing left to load when it goes on
    wait_for(lambda: time.time() > loaded, os.getpid())
    os.kill(rank, signal.SIGCONT)
    wait_for(lambda: not is_running(rank), os.getpid())
    assert (run / "metrics.jsonl").read_bytes() == rows + b'{"step": 6}\n'
    assert not (run / "checkpoints" / "step-00000006").exists()
    finish(process)
    (tmp_path / "loading").unlink()
    process = start([*LAUNCH, *arguments], tmp_path, TROUBLE="slow load")  # a stop meanwhile leaves nothing unsaved
    wait_for((tmp_path / "loading").exists, process.pid)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert (code, err) == (143, "")
    assert launch(tmp_path, "--resume", *steps, "train.steps=7")[0] == 0
    assert [row["step"] for row in rows_of(run)] == [1, 2, 3, 4, 5, 6, 7]


def test_a_stop_whose_save_fails_is_a_failure(tmp_path: Path) -> None:
    command = [*LAUNCH, "--run-dir", "run", "train.steps=100000", "checkpoint.every=50000"]
    code, out, err = stop_at(start(command, tmp_path, **SLOW, TROUBLE="full disk"), tmp_path / "run", 1, signal.SIGTERM)
    assert code == 1, out + err
    assert out.rstrip().endswith("metrics are in run/metrics.jsonl; no checkpoint was saved")
    assert "was not saved: rank 1 on " in err
    assert err.rstrip().endswith("No space left on device")
    assert "Traceback" not in err


@pytest.mark.long
def test_a_run_that_was_stopped_again_and_again_has_the_metrics_of_one_that_was_not(tmp_path: Path) -> None:
    """By a signal to the launcher, SLURM's to all processes, and a death; then it goes on under another plan."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    steps = ["train.steps=16", "checkpoint.every=3", "train.eval_every=1"]  # each stop leaves out an evaluation
    assert launch(tmp_path, "--run-dir", "whole", *steps)[0] == 0

    code, out, err = stop_at(start([*LAUNCH, "--run-dir", "run", *steps], tmp_path, **SLOW), run, 2, signal.SIGTERM)
    saved = rows_of(run)[-1]["step"]
    assert code == 143
    assert not err or err.startswith("colossus: waiting for the running step")  # on a slow machine
    assert "validation_loss" not in numbers(run)[-1]
    checkpoint = f"run/checkpoints/step-{saved:08d}"
    assert f"stopped by SIGTERM after step {saved}; metrics are in run/metrics.jsonl; " in out
    assert f"the latest checkpoint is {checkpoint}, `colossus launch .. --resume` continues from there" in out
    assert f"step {saved}/16  checkpoint " in out
    assert not failed_ranks(run)

    # a data loader's worker in what was forked from a long-lived process of tests may never answer
    command = [*LAUNCH, "--resume", "--run-dir", "run", *steps, "data.num_workers=1"]
    process = start(command, tmp_path, new_python=True, **SLOW)
    wait_for(lambda: has_rows(process, run, saved + 2), process.pid)
    pids = [process.pid, *children(process.pid), *(pid for rank in children(process.pid) for pid in children(rank))]
    assert len(pids) >= 5  # also those that read data
    for signum in (signal.SIGUSR1, signal.SIGTERM):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
    code, out, err = finish(process)
    assert code == 143
    assert not err or err.startswith("colossus: waiting for the running step")  # on a slow machine
    assert f"resumed from {checkpoint} at step {saved}, saved under data 2\n" in out
    again = rows_of(run)[-1]["step"]
    assert f" after step {again}; metrics are in" in out
    assert (run / "checkpoints" / f"step-{again:08d}").is_dir()

    process = start([*LAUNCH, "--resume", "--run-dir", "run", *steps, "checkpoint.every=100"], tmp_path, **SLOW)
    wait_for(lambda: has_rows(process, run, again + 2), process.pid)
    os.kill(children(process.pid)[0], signal.SIGKILL)  # the rows behind the checkpoint come again
    assert finish(process)[0] == 1
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')

    code, out, err = launch(tmp_path, "--resume", *steps)
    assert (code, err) == (0, "")
    assert f"at step {again}, saved under data 2" in out
    assert f"done: 16 steps ({16 - again} of them since it was resumed)" in out
    assert numbers(run) == numbers(whole)
    first = json.loads((run / "config.json").read_text())
    assert (first["checkpoint"]["every"], first["parallel"]["data"]) == (3, 2)

    code, out, err = launch(tmp_path, "--resume", "train.steps=17", "parallel.data=1", *steps[1:])
    assert (code, err) == (0, "")
    assert "at step 16, saved under data 2" in out
    assert numbers(run)[:16] == numbers(whole)
    assert [row["step"] for row in rows_of(run)] == list(range(1, 18))
    assert json.loads((run / "config.json").read_text()) == first
    assert json.loads((run / "config.step-00000016.json").read_text())["parallel"]["data"] == 1


def test_a_job_that_slurm_requeues_goes_on(tmp_path: Path) -> None:
    """srun's tasks are told some time before the job's end; the script then runs again with the same command."""
    folder = tmp_path / "runs" / "mine-77"
    command = ["--run-dir", str(folder), "checkpoint.resume=auto", "train.steps=12", "checkpoint.every=100"]
    tasks = start_slurm_tasks(tmp_path, *command, "train.eval_every=0", **SLOW)
    wait_for(lambda: has_rows(tasks[0], folder, 2), *(task.pid for task in tasks))
    for task in tasks:
        task.send_signal(signal.SIGUSR1)
    ended = [finish(task) for task in tasks]
    assert [code for code, _, _ in ended] == [143, 143]
    saved = rows_of(folder)[-1]["step"]
    assert f"stopped by SIGUSR1 after step {saved}" in ended[0][1]
    assert f"the latest checkpoint is {folder}/checkpoints/step-{saved:08d}" in ended[0][1]

    ended = [finish(task) for task in start_slurm_tasks(tmp_path, *command, "train.eval_every=0")]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert f"at step {saved}, saved under data 2" in ended[0][1]
    assert [row["step"] for row in rows_of(folder)] == list(range(1, 13))

    ended = [finish(task) for task in start_slurm_tasks(tmp_path, "--resume", "--run-dir", "nowhere")]
    assert [code for code, _, _ in ended] == [2, 2]
    assert "--resume: there is no checkpoint in nowhere/checkpoints" in ended[0][2]
    assert ended[1][2] == ""
