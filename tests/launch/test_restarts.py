"""Ranks that are started again after a failure: they go on as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.faults import leftovers, nothing_runs_on
from helpers.launching import LAUNCH, children, failed_ranks, finish, has_rows, is_running, rows_of, start, wait_for
from helpers.restart_faults import CONFIG, numbers, restarts_of

from colossus.config import ConfigError, load_config
from colossus.config.sections import RestartsSection
from colossus.engine.rollback import Rollback
from colossus.launch import agent, attempt_log, command, local_processes, run_folder
from colossus.launch.attempts import Attempts
from colossus.launch.auto_plan import Planned
from colossus.launch.command import check_restart_keys
from colossus.launch.decide import Restart, Stop, decide
from colossus.launch.ends import STOP_SIGNALS, AttemptEnd, NodeEnd, RankEnd
from colossus.launch.resume import RunStart

COMMAND = [*LAUNCH[:-1], str(CONFIG), "--run-dir", "run"]


def run(folder: Path, *arguments: str, **more: str) -> tuple[int, str, str]:
    """Launch in a new folder; nothing of it may stay."""
    (folder / "tmp").mkdir(parents=True)
    with nothing_runs_on(folder):
        ended = finish(start([*COMMAND, *arguments], folder, TMPDIR=str(folder / "tmp"), **more))
        assert leftovers(folder) == []
    run_folder.take(folder / "run", None).close()
    run_folder.hold(folder / "run").close()
    return ended


def test_the_same_error_at_the_same_step_is_not_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    code, out, err = run(folder, "--max-restarts", "5", TROUBLES="raise@6 " * 3)
    assert code == 1, out
    assert err.count("run failed: rank 1 at step 6") == 2
    assert err.count("restart 1 of 5: ") == 1
    assert err.rstrip().endswith("no restart: rank 1 has raised the same error in step 6 before")
    assert [row["step"] for row in rows_of(folder / "run")] == [1, 2, 3, 4, 5]
    assert len(restarts_of(folder)) == 1
    assert [end.rank for end in failed_ranks(folder / "run")] == [1, 0]


def test_a_run_without_saves_begins_anew_as_often_as_it_may(tmp_path: Path) -> None:
    keys = ["checkpoint.every=0", "launch.restarts=dict(max=2, within='1h')"]
    code, _, err = run(tmp_path / "twice", *keys, TROUBLES="kill@6 kill@6")
    assert code == 0, err
    assert "restart 2 of 2: the ranks start again\n" in err
    assert "restarted after step 0, from the beginning, since nothing was saved: 5 steps to repeat" in err
    assert run(tmp_path / "whole", "checkpoint.every=0")[0] == 0
    assert numbers(tmp_path / "twice") == numbers(tmp_path / "whole")
    assert [(row["restart"], row["steps_redone"]) for row in restarts_of(tmp_path / "twice")] == [(1, 5), (2, 5)]

    code, _, err = run(tmp_path / "early", *keys, "launch.restarts.max=1", TROUBLES="kill@constructor " * 3)
    assert code == 1, err
    assert err.count("run failed: rank 1") == 2
    assert err.rstrip().endswith("no restart: 1 of launch.restarts.max = 1 are used")
    (row,) = restarts_of(tmp_path / "early")
    assert (row["restart"], "from_step" in row) == (1, False)


@pytest.mark.parametrize(("target", "signum"), [("launcher", signal.SIGINT), ("rank", signal.SIGTERM)])
def test_a_stop_is_no_failure(tmp_path: Path, target: str, signum: int) -> None:
    process = start([*COMMAND, "launch.restarts=3", "train.steps=100000"], tmp_path, STEP_SECONDS="0.02")
    wait_for(lambda: has_rows(process, tmp_path / "run", 2), process.pid)
    os.kill(process.pid if target == "launcher" else children(process.pid)[0], signum)
    code, out, err = finish(process)
    assert (code, err) == (128 + signum, "")
    assert f"stopped by {signal.Signals(signum).name} after step" in out
    assert not restarts_of(tmp_path)


@pytest.mark.long
def test_a_stop_after_a_restart_is_one_too(tmp_path: Path) -> None:
    keys = ["launch.restarts=3", "train.steps=100000"]
    process = start([*COMMAND, *keys], tmp_path, TROUBLES="kill@6", STEP_SECONDS="0.02")
    wait_for(lambda: has_rows(process, tmp_path / "run", 8), process.pid)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert (code, err.count("run failed"), "restart 1 of 3" in err) == (130, 1, True), out + err
    last = rows_of(tmp_path / "run")[-1]["step"]
    assert f"stopped by SIGINT after step {last}; " in out
    assert (tmp_path / "run" / "checkpoints" / f"step-{last:08d}").is_dir()


@pytest.mark.long
def test_servers_are_started_again_with_their_workers(tmp_path: Path) -> None:
    words = ["launch.restarts=1", "checkpoint.every=2", "train.steps=100000", "train.eval_every=0"]
    command_line = [*LAUNCH[:-1], str(CONFIG.with_name("served.py")), "--run-dir", "run", *words]
    process = start(command_line, tmp_path, STEP_SECONDS="0.01")
    wait_for(lambda: has_rows(process, tmp_path / "run", 3), process.pid)
    first = servers_of(process.pid)
    os.kill(first[0], signal.SIGKILL)
    wait_for(
        lambda: process.poll() is not None or any("from_step" in row for row in restarts_of(tmp_path)), process.pid
    )
    second = servers_of(process.pid)
    assert (len(first), len(second), set(first) & set(second)) == (2, 2, set())
    (row,) = restarts_of(tmp_path)
    wait_for(lambda: has_rows(process, tmp_path / "run", row["from_step"] + 2), process.pid)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert (code, err.count("run failed: server ")) == (143, 1), out + err
    assert f"process {first[0]}) was killed by SIGKILL" in row["cause"]
    wait_for(lambda: not any(map(is_running, [*first, *second])), *second)


def servers_of(launcher: int) -> list[int]:
    """By the files that they print to."""
    return [pid for pid in children(launcher) if os.readlink(f"/proc/{pid}/fd/1").endswith(".log")]


# -- the record of attempts -----------------------------------------------------------------------------------


def test_ranks_go_back_until_they_have_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = Attempts(lambda: RunStart(tmp_path, None, ()))
    spike, death = RankEnd(0, 1, kind="error", type="LossSpike", step=6, rollback=(5, None)), RankEnd(0, -9)
    orders = []
    for cause, trains in ((death, True), (spike, False), (death, True), (death, True)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempts.number))
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", attempts.launch)
        attempts.begin()
        orders.append(attempt_log.pending_rollback(tmp_path))
        if trains:
            attempt_log.record_start(tmp_path, 3, tmp_path)
        end = AttemptEnd({0: cause}, folder=tmp_path)
        attempts.record(end, decide(end, attempts.history, RestartsSection(max=9), 100.0 + attempts.number))
    assert orders == [None, None, Rollback(5, None, 101.0), None]
    rows = attempt_log.read(tmp_path)
    assert [row["from_step"] for row in rows.values() if "from_step" in row] == [3, 3, 3]
    assert [row["cause"].split(":")[0] for row in rows.values()] == [
        "rank 0 was killed by SIGKILL",
        "rank 0 at step 6 raised LossSpike",
        "rank 0 was killed by SIGKILL",
        "rank 0 was killed by SIGKILL",
    ]
    assert rows[1]["ranks"][0].error == spike.error
    assert [row["ended"] for row in rows.values()] == [100.0, 101.0, 102.0, 103.0], "the times of the decisions"
    assert Attempts(lambda: RunStart(tmp_path, None, ())).begin().folder == tmp_path
    assert [*attempt_log.read(tmp_path)] == [0], "another launch in the same folder"


def test_an_attempt_after_which_none_follows_has_its_time(tmp_path: Path) -> None:
    attempts = Attempts(lambda: RunStart(tmp_path, None, ()))
    attempts.begin()
    attempts.record(AttemptEnd({0: RankEnd(0, -9)}, folder=tmp_path), Stop(1, "1 of launch.restarts.max = 1 are used"))
    row = attempt_log.read(tmp_path)[0]
    assert row["began"] <= row["ended"]
    assert (row["code"], row["reason"]) == (1, "1 of launch.restarts.max = 1 are used")


def test_an_order_of_an_earlier_launch_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a full disk has not taken the first rows of this launch."""
    earlier, later = (Attempts(lambda: RunStart(tmp_path, None, ())) for _ in range(2))
    earlier.begin()
    earlier.record(AttemptEnd({0: RankEnd(0, 1)}, folder=tmp_path), Restart(Rollback(5, None, 1.0), count=1, ended=1.0))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", earlier.launch)
    assert attempt_log.pending_rollback(tmp_path) == Rollback(5, None, 1.0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", later.launch)
    assert attempt_log.pending_rollback(tmp_path) is None, "no row of this launch"
    attempt_log.append(tmp_path, 1, launch=later.launch, began=2.0)
    assert attempt_log.pending_rollback(tmp_path) is None
    assert [[*launch] for launch in attempt_log.read_launches(tmp_path)] == [[0], [1]]


def test_a_node_that_becomes_the_first_has_the_history(tmp_path: Path) -> None:
    first, second = Attempts(lambda: RunStart(tmp_path, "auto", ())), Attempts(partial(pytest.fail, "begins anew"))
    first.begin()
    second.receive(tmp_path, json.loads(json.dumps(first.shared())))
    error = RankEnd(0, 1, kind="error", type="ValueError", message="boom", step=6)
    end = AttemptEnd({1: RankEnd(1, 143, after_stop=True)}, folder=tmp_path, node=1, others={0: NodeEnd({0: error})})
    assert isinstance(second.record(end, decide(end, second.history, RestartsSection(max=9), 1.0)), Restart)
    assert "ended" not in attempt_log.read(tmp_path)[0], "that is for the first node, which is lost"
    second.begin()
    assert attempt_log.read(tmp_path)[0]["cause"] == "rank 0 at step 6 raised ValueError: boom"
    third = Attempts(partial(pytest.fail, "begins anew"))
    third.receive(tmp_path, json.loads(json.dumps(second.shared())))
    assert isinstance(decide(end, third.history, RestartsSection(max=9), 2.0), Stop)
    for attempts in (first, second):
        attempts.close()


def test_an_order_to_go_back_that_cannot_be_written_is_not_forgotten(tmp_path: Path) -> None:
    attempts = Attempts(lambda: RunStart(tmp_path, None, ()))
    attempts.begin()
    (tmp_path / attempt_log.ROWS).unlink()
    (tmp_path / attempt_log.ROWS).mkdir()
    end = AttemptEnd({0: RankEnd(0, -9)}, folder=tmp_path)
    assert attempts.record(end, Restart(count=1, ended=1.0)) == Restart(count=1, ended=1.0)
    stop = attempts.record(end, Restart(Rollback(5, None, 1.0), count=1, ended=1.0))
    assert isinstance(stop, Stop)
    assert "the order to go back cannot be written" in stop.reason
    other = Attempts(partial(pytest.fail, "begins anew"))  # of another node, where the first has gone
    other.receive(tmp_path, json.loads(json.dumps(attempts.shared())))
    end = AttemptEnd({1: RankEnd(1, 1)}, folder=tmp_path, node=1)
    assert isinstance(other.record(end, Restart(Rollback(5, None, 1.0), count=1, ended=1.0)), Restart)
    with pytest.raises(ConfigError, match="the order to go back cannot be written"):
        other.begin()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("on_spike.factor=3", ["train.on_spike.action = 'rollback' is for a restart by the launcher"]),
        ("on_spike.factor=3 checkpoint.every=0 launch.restarts=3", ["'rollback' goes back to a checkpoint: set"]),
        ("on_spike.factor=3 launch.restarts=3 train.batch_ramp=dict(start=4,steps=2)", ["of a batch_ramp cannot"]),
        ("on_mismatch='restart' train.check_replicas_every=2", ["'restart' is for a restart by the launcher"]),
        ("on_mismatch='restart' launch.restarts=3", ["nothing is compared: set check_replicas_every"]),
        (
            "on_mismatch='restart' train.check_replicas_every=7 launch.restarts=3",
            ["checkpoint.keep_last = 3 with checkpoint.every = 3 has checkpoints of the last 6 steps"],
        ),
    ],
)
def test_what_needs_a_restart_or_a_checkpoint_is_refused(keys: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        check_restart_keys(load_config(CONFIG, f"train.{keys}".split()))
    assert all(word in str(error.value) for word in words), error.value


def test_what_can_go_back_is_not_refused() -> None:
    back = "train.on_spike.factor=3 train.on_mismatch='restart' launch.restarts=3"
    for keys in ("6", "7 checkpoint.keep_last=0", "7 checkpoint.keep_every=9"):
        check_restart_keys(load_config(CONFIG, f"{back} train.check_replicas_every={keys}".split()))
    check_restart_keys(load_config(CONFIG, ["train.on_spike=dict(factor=3.0,action='raise')", "checkpoint.every=0"]))


# -- where there are none -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_processes")
def test_torchrun_has_restarts_of_its_own(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "run_worker", lambda *arguments, **options: 0)
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert command.run(str(CONFIG), ["launch.restarts=3"]) == 0
    assert "launch.restarts: without effect under torchrun and srun" in capsys.readouterr().err


def test_two_stop_signals_at_once_are_one_stop() -> None:
    """Send both as SLURM does: the second must not keep the launcher from ending its ranks."""
    both = {signal.SIGUSR1, signal.SIGTERM}

    def plan(num_nodes: int) -> Any:
        signal.pthread_sigmask(signal.SIG_BLOCK, both)
        try:
            for signum in both:
                signal.pthread_kill(threading.get_ident(), signum)  # another thread would hear it at once
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
        pytest.fail("the launcher has heard of no stop")

    with agent.restored_signals():
        attempts = Attempts(partial(pytest.fail, "the attempt began"))
        stopped = agent.run_workers(agent.Job(plan, load_config(CONFIG), (str(CONFIG),), 2), attempts)
    assert (stopped.signum, stopped.late_signum) == (signal.SIGUSR1, signal.SIGTERM)


def test_ranks_do_not_outlive_an_error_of_their_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start_one(*arguments: Any) -> Any:
        if started:
            raise OSError("no more processes")
        started.append(subprocess.Popen(["sleep", "60"]))
        return started[0]

    monkeypatch.setattr(agent, "start_process", start_one)
    config = load_config(CONFIG)
    job = agent.Job(lambda num_nodes: (Planned(config, []), 1), config, (str(CONFIG),), 2)
    with agent.restored_signals(), pytest.raises(OSError, match="no more processes"):
        agent.run_workers(job, Attempts(lambda: RunStart(tmp_path, None, ())))
    assert started[0].poll() == -signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir() if "resolved" in path.name] == [run_folder.RESOLVED]


def test_a_stop_while_an_attempt_is_ended_is_not_forgotten() -> None:
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    end = AttemptEnd()
    with agent.restored_signals():
        local_processes.note_stop_signals(end)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert end.late_signum == signal.SIGINT
        begin = partial(pytest.fail, "the next attempt began")
        job = agent.Job(partial(pytest.fail, "a plan was made"), load_config(CONFIG), (str(CONFIG),), 2)
        stopped = agent.run_workers(job, Attempts(begin), end)
    assert (stopped.signum, stopped.ranks) == (signal.SIGINT, {})
    assert {signum: signal.getsignal(signum) for signum in STOP_SIGNALS} == before


@pytest.mark.long
def test_torchrun_starts_ranks_again_which_go_on(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*torchrun, "--max-restarts", "1", *LAUNCH[1:-1], str(CONFIG), "--run-dir"]
    # with gloo the new ranks would read the addresses of the old ones
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    for name, troubles in (("run", "kill@6"), ("whole", "")):
        (tmp_path / name).mkdir()
        again = ["run", "checkpoint.resume=auto"]
        code, out, err = finish(start([*words, *again], tmp_path / name, TROUBLES=troubles, **own_store))
        assert code == 0, out + err
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
