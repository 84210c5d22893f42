"""Ranks that are started again after a failure: they go on as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.faults import leftovers, nothing_runs_on
from helpers.launching import LAUNCH, children, finish, has_rows, is_running, rows_of, start, wait_for
from helpers.restart_faults import CONFIG, numbers, restarts_of

from colossus.config import ConfigError, load_config
from colossus.launch import agent, command, failures, rank_processes, restarts, run_folder
from colossus.launch.failures import FailureRecord
from colossus.launch.outcome import Outcome, RankExit
from colossus.launch.restart_checks import check_restart_keys
from colossus.launch.restarts import Restarts
from colossus.launch.resume import RunStart
from colossus.launch.stop import STOP_SIGNALS

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
    assert [record.rank for record in failures.read_all(folder / "run")] == [0, 1]


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
    assert not (tmp_path / "run" / restarts.ROWS).exists()


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
    rows = tmp_path / "run" / restarts.ROWS
    wait_for(lambda: process.poll() is not None or (rows.exists() and rows.stat().st_size > 0), process.pid)
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


# -- the decision ---------------------------------------------------------------------------------------------


def record(
    kind: Any = "error", type_: str = "ValueError", message: str = "boom", step: int | None = 4
) -> FailureRecord:
    return FailureRecord(0, kind, type_, message, "", step=step)


def make_restarts(folder: Path, **section: Any) -> Restarts:
    config = load_config(CONFIG, [f"launch.restarts={section!r}"])
    restarts = Restarts(config, lambda: RunStart(folder, None, ()))
    restarts.begin()
    return restarts


def follows(decider: Restarts, folder: Path, failure: FailureRecord | None, code: int = 1, **more: Any) -> bool:
    failures.clear(folder)
    if failure is not None:
        failures.write(folder, failure)
    outcome = Outcome({0: RankExit(code), 1: RankExit(0)}, folder=folder, **more)
    return decider.follow(outcome, 1)


@pytest.mark.parametrize(
    ("failure", "more", "does"),
    [
        (record(), {}, True),
        (None, {}, True),  # a death
        (record("communication", "RuntimeError", "Connection closed by peer"), {}, True),
        (record(type_="NonFiniteGradients"), {}, False),
        (None, {"server": "server 1 (host a) was killed"}, True),
        (record(), {"late_signum": signal.SIGINT}, False),
        (record(), {"signum": signal.SIGTERM}, False),
        (None, {"code": 143}, False),  # a stop of a rank, whose save may have failed
    ],
)
def test_after_which_failures_ranks_are_started_again(
    tmp_path: Path, failure: FailureRecord | None, more: dict[str, Any], does: bool
) -> None:
    decider = make_restarts(tmp_path, max=3)
    assert follows(decider, tmp_path, failure, **more) is does
    decider.close()


def test_errors_are_the_same_by_words_and_step(tmp_path: Path) -> None:
    decider = make_restarts(tmp_path, max=9)
    for failure in (record(), record(step=5), record(message="bang"), record("stuck"), record("stuck")):
        assert follows(decider, tmp_path, failure)
    assert not follows(decider, tmp_path, record())
    decider.close()


def order_after(decider: Restarts, folder: Path, failure: FailureRecord | None) -> restarts.Order | None:
    """What ranks are told that are started again."""
    assert follows(decider, folder, failure)
    decider.receive_history(folder, json.loads(json.dumps(decider.history())))
    return restarts.order_of_restart()


def test_ranks_go_back_until_they_have_trained_again(tmp_path: Path) -> None:
    decider, spike = make_restarts(tmp_path, max=9), replace(record(type_="LossSpike", step=6), rollback=(5, None))
    first = order_after(decider, tmp_path, spike)
    assert first is not None
    assert first[:2] == (5, None)
    assert order_after(decider, tmp_path, None) == first, "a rank has died before the first step"
    restarts.record_restart(tmp_path, 3, tmp_path)
    assert order_after(decider, tmp_path, None) == restarts.Order()
    later = order_after(decider, tmp_path, replace(record(type_="ReplicasDiffer", step=8), rollback=(6, 0)))
    assert later is not None
    assert later[:2] == (6, 0)
    assert later.time > first.time
    assert not follows(decider, tmp_path, spike), "the same spike again"
    decider.close()
    assert restarts.order_of_restart() is None
    rows = [json.loads(line) for line in (tmp_path / restarts.ROWS).read_text().splitlines()]
    assert [(row["restart"], row.get("from_step")) for row in rows] == [(1, None), (2, 3)]


def test_what_would_come_again_needs_a_way_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decider = make_restarts(tmp_path, max=9)
    for type_, words in (("LossSpike", "on_spike.action=rollback leaves"), ("ReplicasDiffer", "on_mismatch=restart")):
        assert not follows(decider, tmp_path, record(type_=type_))
        assert words in capsys.readouterr().err
    decider.close()


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


def test_restarts_are_counted_within_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decider, seen = make_restarts(tmp_path, max=2, within="1h"), []
    for now in (0.0, 1000.0, 3599.0, 3601.0, 4000.0, 8000.0):
        clock = SimpleNamespace(time=partial(float, now))
        monkeypatch.setattr(restarts, "time", clock)
        seen.append(follows(decider, tmp_path, None))
    assert seen == [True, True, False, True, False, True]
    decider.close()


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
        restarts = Restarts(load_config(CONFIG), partial(pytest.fail, "the attempt began"))
        stopped = agent.run_workers(agent.Job(plan, load_config(CONFIG), (str(CONFIG),), 2), restarts)
    assert (stopped.signum, stopped.late_signum) == (signal.SIGUSR1, signal.SIGTERM)


def test_a_stop_while_an_attempt_is_ended_is_not_forgotten() -> None:
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    outcome = Outcome()
    with agent.restored_signals():
        rank_processes.note_stop_signals(outcome)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert outcome.late_signum == signal.SIGINT
        begin = partial(pytest.fail, "the next attempt began")
        job = agent.Job(partial(pytest.fail, "a plan was made"), load_config(CONFIG), (str(CONFIG),), 2)
        stopped = agent.run_workers(job, Restarts(load_config(CONFIG), begin), outcome)
    assert (stopped.signum, stopped.exits) == (signal.SIGINT, {})
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
