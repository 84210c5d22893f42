"""Run folders: each run has one of its own, which nobody else can take while it lives."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.launching import (
    LAUNCH,
    TINY,
    environment,
    finish,
    has_rows,
    launch,
    rows_of,
    start,
    start_slurm_tasks,
    wait_for,
)

from colossus.launch import run_folder


def test_a_second_launch_into_the_folder_of_a_live_run_exits_with_2(tmp_path: Path) -> None:
    with run_folder.take(tmp_path / "run", "--run-dir"):  # before the first row of metrics
        code, out, err = launch(tmp_path)
    assert (code, out) == (2, "")
    assert "another run is using it now (process" in err
    assert err.count("\n") == 1
    first = start([*LAUNCH, "--run-dir", "run", "train.steps=100000"], tmp_path)
    try:
        wait_for(lambda: has_rows(first, tmp_path / "run", 2), first.pid)
        assert launch(tmp_path)[0] == 2
        for folder in ("run", "nowhere"):  # ranks without a launcher leave nothing in it either
            tasks = start_slurm_tasks(tmp_path, "--run-dir", folder, *(["--resume"] if folder == "nowhere" else []))
            ended = [finish(task) for task in tasks]
            assert [code for code, _, _ in ended] == [2, 2], ended
        assert not (tmp_path / "run" / "failures").exists()
        assert not (tmp_path / "nowhere").exists()
    finally:
        first.send_signal(signal.SIGTERM)
        assert finish(first)[0] == 143
    steps = [row["step"] for row in rows_of(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))
    code, _, err = launch(tmp_path)
    assert code == 2
    assert "holds the metrics of another run" in err


def test_a_folder_without_metrics_is_free_again_when_its_run_is_over(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("")
    (tmp_path / "notes.txt").write_text("mine")
    for _ in range(2):
        run_folder.prepare(tmp_path).close()
    metrics.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert run_folder.last_metrics(tmp_path) == {"step": 2}  # the last whole row


def test_ctrl_c_while_the_config_is_checked_is_one_line(tmp_path: Path) -> None:
    config = tmp_path / "slow.py"
    config.write_text(
        f"import time\nopen({str(tmp_path / 'begun')!r}, 'w').close()\ntime.sleep(30)\n" + TINY.read_text()
    )
    for command in (["launch"], ["config"]):
        process = subprocess.Popen(
            [sys.executable, "-m", "colossus", *command, str(config)],
            cwd=tmp_path,
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        deadline = time.monotonic() + 30
        while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        assert (process.returncode, err) == (130, "colossus: stopped by Ctrl-C\n")
        (tmp_path / "begun").unlink()
    assert not (tmp_path / "runs").exists()


def test_default_names_follow_each_other_in_every_time_zone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container in UTC, then its host some hours behind."""
    try:
        for zone in ("UTC", "XYZ+9"):  # 9 hours behind
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            folder = run_folder.default_folder("words", tmp_path, make=True)
            assert run_folder.of_name("words", tmp_path)[0] == folder
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(file: object, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_folder.fcntl, "flock", refuse)
    run_folder.take(tmp_path / "run", "--run-dir").close()
    err = capsys.readouterr().err
    assert err.startswith(
        f"colossus: {tmp_path / 'run' / 'run.lock'}: the file system has no locks (No locks available)"
    )
    assert err.count("\n") == 1
