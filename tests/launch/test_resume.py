"""Launched runs that are stopped, killed, requeued and resumed: what they leave, and how they go on."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from helpers.launching import LAUNCH, Process, children, finish, has_rows, launch, rows_of, start, wait_for

#: of a row, what depends on the run and not on the machine
NUMBERS = ("step", "loss", "grad_norm", "lr", "tokens", "validation_loss")
SLOW = {"STEP_SECONDS": "0.05"}


def numbers(folder: Path) -> list[dict[str, Any]]:
    return [{key: row[key] for key in NUMBERS if key in row} for row in rows_of(folder)]


def stop_at(process: Process, folder: Path, rows: int, signum: int) -> tuple[int, str, str]:
    wait_for(lambda: has_rows(process, folder, rows), process.pid)
    process.send_signal(signum)
    return finish(process)


def test_a_run_that_was_stopped_again_and_again_has_the_metrics_of_one_that_was_not(tmp_path: Path) -> None:
    """By a signal to the launcher, SLURM's to all processes, and a death; then it goes on under another plan."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    steps = ["train.steps=16", "checkpoint.every=3"]
    assert launch(tmp_path, "--run-dir", "whole", *steps)[0] == 0

    code, out, err = stop_at(start([*LAUNCH, "--run-dir", "run", *steps], tmp_path, **SLOW), run, 2, signal.SIGTERM)
    saved = rows_of(run)[-1]["step"]
    assert (code, err) == (143, "")
    checkpoint = f"run/checkpoints/step-{saved:08d}"
    assert f"stopped by SIGTERM after step {saved}; metrics are in run/metrics.jsonl; " in out
    assert f"the latest checkpoint is {checkpoint}, `colossus launch .. --resume` goes on from there" in out
    assert f"step {saved}/16  checkpoint " in out
    assert not (run / "failures").exists()

    process = start([*LAUNCH, "--resume", "--run-dir", "run", *steps], tmp_path, **SLOW)
    wait_for(lambda: has_rows(process, run, saved + 2), process.pid)
    for pid in (process.pid, *children(process.pid)):
        os.kill(pid, signal.SIGUSR1)
    code, out, err = finish(process)
    assert (code, err) == (143, "")
    assert f"resumed from {checkpoint} at step {saved}, saved under data 2\n" in out
    again = rows_of(run)[-1]["step"]
    assert f"stopped by SIGUSR1 after step {again}" in out
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

    code, out, err = launch(tmp_path, "--resume", "train.steps=17", "parallel.data=1", "checkpoint.every=3")
    assert (code, err) == (0, "")
    assert "at step 16, saved under data 2" in out
    assert numbers(run)[:16] == numbers(whole)
    assert [row["step"] for row in rows_of(run)] == list(range(1, 18))
    assert json.loads((run / "config.json").read_text()) == first
    assert json.loads((run / "config.step-00000016.json").read_text())["parallel"]["data"] == 1
