"""How a stop ends processes: by themselves, with patience for those that save, by force where nothing else helps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from colossus.launch import ending, finished, stop
from colossus.launch.stop import STOP_SIGNALS, StopSignals, exit_code


def test_exit_codes() -> None:
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGUSR1: 143, signal.SIGUSR2: 143}
    assert {signum: exit_code(signum) for signum in STOP_SIGNALS} == codes


def in_child(body: Callable[[], None]) -> tuple[int, float]:
    """(exit code, seconds) of a forked process in which the body runs, and then only waits."""
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        try:
            body()
            time.sleep(20)
        finally:
            os._exit(99)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), time.monotonic() - began


def stopped(
    monkeypatch: pytest.MonkeyPatch,
    *,
    patience: float | None,
    progress_seconds: float = 0.0,
    hurried_after: float = 99.0,
    signum: int = signal.SIGUSR1,
) -> tuple[int, float]:
    """How a process ends that is told to stop, makes progress for a while, and then hangs."""
    monkeypatch.setattr(stop, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(stop, "_LOOK_SECONDS", 0.05)

    def body() -> None:
        began = time.monotonic()
        signals = StopSignals(0.3, is_hurried=lambda: time.monotonic() - began > hurried_after)
        signals.install()
        signals.ready(lambda signum: None, patience)
        os.kill(os.getpid(), signum)
        while time.monotonic() - began < progress_seconds:
            signals.progress()
            time.sleep(0.05)

    return in_child(body)


def test_patience_begins_anew_with_progress_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    code, seconds = stopped(monkeypatch, patience=1.5, progress_seconds=2.0)
    assert code == 143
    assert seconds > 2.0
    # where nothing is saved, progress buys no time
    code, seconds = stopped(monkeypatch, patience=None, progress_seconds=5.0, signum=signal.SIGINT)
    assert code == 130
    assert seconds < 4.0


def test_nothing_is_waited_for_when_a_save_can_not_be_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    code, seconds = stopped(monkeypatch, patience=15.0, progress_seconds=15.0, hurried_after=0.5)
    assert code == 143
    assert 0.75 < seconds < 10.0


def test_a_signal_before_there_is_something_to_save_ends_at_once() -> None:
    def body() -> None:
        StopSignals().install()
        os.kill(os.getpid(), signal.SIGUSR2)

    code, seconds = in_child(body)
    assert code == 143
    assert seconds < 4.0


def test_a_signal_that_was_heard_just_before_a_run_could_stop_is_not_forgotten() -> None:
    signals, asked = StopSignals(), []
    signals.received = signal.SIGTERM
    signals.ready(asked.append)
    assert asked == [signal.SIGTERM]


def test_processes_that_a_rank_has_forked_outlive_what_slurm_sends_to_all() -> None:
    def body() -> None:
        signals = StopSignals(5.0)
        signals.install()
        signals.ready(lambda signum: None)
        child = os.fork()
        if not child:
            time.sleep(0.5)
            os._exit(7)
        os.kill(child, signal.SIGUSR1)
        os.kill(child, signal.SIGUSR2)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    assert in_child(body)[0] == 7


RANK = """
import os, signal, sys, time
marks, rank, beats, marked, deaf = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4], sys.argv[5]
told = []
signal.signal(signal.SIGTERM, lambda *_: None if deaf == "deaf" else told.append(1))
open(os.path.join(marks, "ready" + rank), "w").close()
while not told:
    time.sleep(0.01)
until = time.monotonic() + beats
while time.monotonic() < until and not os.path.exists(os.path.join(marks, "hurry")):
    open(os.path.join(marks, rank + ".beat"), "w").close()
    time.sleep(0.05)
if marked == "marked":
    open(os.path.join(marks, rank), "w").close()
sys.exit(143)
"""


def rank(marks: Path, number: int, beats: float, marked: bool = True, deaf: bool = False) -> subprocess.Popen[bytes]:
    """A rank that takes its time after a SIGTERM."""
    words = [str(marks), str(number), str(beats), "marked" if marked else "", "deaf" if deaf else ""]
    process = subprocess.Popen([sys.executable, "-S", "-c", RANK, *words], start_new_session=True)
    while not (marks / f"ready{number}").exists():
        time.sleep(0.01)
    return process


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little patience; the signal handlers of the tests come back."""
    monkeypatch.setattr(ending, "KILL_SECONDS", 1.0)
    monkeypatch.setattr(ending, "SAY_SECONDS", 0.3)
    monkeypatch.setattr(ending, "AGAIN_SECONDS", 0.1)
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.usefixtures("quick")
def test_the_launcher_waits_for_signs_of_life_and_kills_what_gives_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saving, deaf = rank(tmp_path, 0, beats=2.0), rank(tmp_path, 1, beats=0.0, deaf=True)
    exits = ending.end_processes({0: saving}, signal.SIGTERM, tmp_path)
    assert exits[0].code == 143
    assert not (tmp_path / "hurry").exists()
    assert capsys.readouterr().err.count("waiting for the running step to end and its checkpoint to be saved") == 1
    # one that does not answer is killed, and what the others save is nothing any more
    saving = rank(tmp_path, 2, beats=30.0)
    exits = ending.end_processes({1: deaf, 2: saving}, signal.SIGTERM, tmp_path)
    assert {number: ended.code for number, ended in exits.items()} == {1: -signal.SIGKILL, 2: 143}
    assert (tmp_path / "hurry").exists()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("reason", ["a rank has failed", "a rank ends early", "Ctrl-C again"])
def test_ranks_are_told_when_there_is_nothing_to_wait_for(tmp_path: Path, reason: str) -> None:
    processes = {0: rank(tmp_path, 0, beats=30.0)}
    if reason == "a rank ends early":
        processes[1] = rank(tmp_path, 1, beats=0.1, marked=False)
    if reason == "Ctrl-C again":
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    exits = ending.end_processes(processes, signal.SIGTERM, tmp_path, has_failed=reason == "a rank has failed")
    assert time.monotonic() - began < 15.0
    assert {ended.code for ended in exits.values()} == {143}


@pytest.mark.usefixtures("quick")
def test_a_rank_that_is_through_may_take_its_time_to_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is killed while Python takes itself apart ends as it has said: 143 after a stop, 0 at the last step."""
    monkeypatch.setattr(ending, "KILL_SECONDS", 0.2)
    with finished.expected() as marks:
        slow = {number: rank(marks, number, beats=0.0, deaf=True) for number in range(3)}
        finished.mark(0, 143)
        finished.mark(1, 0)
        exits = ending.end_processes(slow, signal.SIGTERM, marks)
        assert [process.returncode for process in slow.values()] == [-signal.SIGKILL] * 3
        assert {number: ended.code for number, ended in exits.items()} == {0: 143, 1: 0, 2: -signal.SIGKILL}


@pytest.mark.usefixtures("quick")
def test_what_a_terminal_sends_to_all_is_no_second_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "AGAIN_SECONDS", 5.0)
    processes = {0: rank(tmp_path, 0, beats=1.0)}
    sent = [
        threading.Timer(seconds, os.kill, (os.getpid(), signum))
        for seconds, signum in ((0.3, signal.SIGINT), (0.4, signal.SIGTERM))
    ]
    for timer in sent:
        timer.start()
    ending.end_processes(processes, signal.SIGTERM, tmp_path)
    for timer in sent:
        timer.join()  # a late one would end the tests' process
    assert not (tmp_path / "hurry").exists()


def test_signs_go_through_the_folder_of_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert not finished.is_hurried()
    finished.beat()  # without a launcher nobody asks
    with finished.expected() as folder:
        assert finished.last_beat(folder, 3) is None
        finished.beat()
        assert finished.last_beat(folder, 3) is not None
        finished.hurry(folder)
        assert finished.is_hurried()
