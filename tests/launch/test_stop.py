"""How a stop ends processes: by themselves, with patience for those that save, by force where nothing else helps."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from colossus.launch import local_processes, stop
from colossus.launch.ends import STOP_SIGNALS, AttemptEnd, RankEnd
from colossus.launch.local_processes import LocalProcesses, RankFiles, made_rank_files
from colossus.launch.stop import StopSignals
from colossus.python_process import python_words


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
    tmp_path: Path,
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
        signals = StopSignals(files=RankFiles(tmp_path))
        signals.install()
        signals.ready(lambda signum: None, patience)
        os.kill(os.getpid(), signum)
        began = time.monotonic()
        while time.monotonic() - began < progress_seconds:
            signals.progress()
            time.sleep(0.05)
            if time.monotonic() - began > hurried_after:
                RankFiles(tmp_path).hurry()

    return in_child(body)


def test_nothing_is_waited_for_when_a_save_can_not_be_complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, seconds = stopped(monkeypatch, tmp_path, patience=15.0, progress_seconds=15.0, hurried_after=0.5)
    assert code == 143
    assert 0.75 < seconds < 10.0


def test_a_signal_before_there_is_something_to_save_ends_at_once() -> None:
    def body() -> None:
        StopSignals().install()
        os.kill(os.getpid(), signal.SIGUSR2)

    code, seconds = in_child(body)
    assert (code, seconds < 4.0) == (143, True)
    signals, requests = StopSignals(), []
    signals.received = signal.SIGTERM  # heard just before a run could stop
    signals.ready(requests.append)
    assert requests == [signal.SIGTERM]


def test_a_rank_whose_launcher_has_gone_while_it_was_loaded_does_not_begin(tmp_path: Path) -> None:
    """Nor when it is faster than the thread that looks for the launcher."""
    files = RankFiles(tmp_path / "ranks")
    files.folder.mkdir()

    def body() -> None:
        StopSignals(parent=os.getpid(), files=files).ready(lambda signum: None)
        (tmp_path / "begun").touch()
        os._exit(0)

    assert in_child(body)[0] == 143
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_ctrl_c_during_the_imports_of_a_rank_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text("import pathlib, time; pathlib.Path('imported').touch(); time.sleep(60)")
    words = python_words("colossus.launch.worker", "run", "", "resolved.json", "config.py")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    rank = subprocess.Popen(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE)
    while not (tmp_path / "imported").exists():
        assert rank.poll() is None
        time.sleep(0.01)
    rank.send_signal(signal.SIGINT)
    _, err = rank.communicate()
    assert (rank.returncode, err) == (-signal.SIGINT, b"")


def test_processes_that_a_rank_has_forked_outlive_what_slurm_sends_to_all() -> None:
    def body() -> None:
        signals = StopSignals()
        signals.install()
        signals.ready(lambda signum: None)
        child = os.fork()
        if not child:
            time.sleep(0.5)
            os._exit(7)
        os.kill(child, signal.SIGUSR1)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    assert in_child(body)[0] == 7


RANK = """
import os, signal, sys, time
folder, rank, beats, finishes, deaf = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4], sys.argv[5]
told = []
signal.signal(signal.SIGTERM, lambda *_: None if deaf == "deaf" else told.append(1))
open(os.path.join(folder, "ready" + rank), "w").close()
while not told:
    time.sleep(0.01)
until = time.monotonic() + beats
while time.monotonic() < until and not os.path.exists(os.path.join(folder, "hurry")):
    open(os.path.join(folder, rank + ".beat"), "w").close()
    time.sleep(0.05)
if finishes:
    with open(os.path.join(folder, rank + ".end"), "w") as file:
        file.write('{"rank": %s, "code": 143, "kind": "finished"}' % rank)
sys.exit(143)
"""


class Ranks:
    """Processes that take their time after a SIGTERM, and what their launcher sees of their end."""

    def __init__(self, folder: Path) -> None:
        self.files, self.attempt = RankFiles(folder), AttemptEnd()
        self._processes = LocalProcesses(self.attempt, self.files)

    def start(self, number: int, beats: float = 0.0, finishes: bool = True, deaf: bool = False) -> None:
        folder = self.files.folder
        words = [str(folder), str(number), str(beats), "yes" if finishes else "", "deaf" if deaf else ""]
        self._processes.ranks[number] = subprocess.Popen(
            [sys.executable, "-S", "-c", RANK, *words], start_new_session=True
        )
        while not (folder / f"ready{number}").exists():
            time.sleep(0.01)

    def end(self, can_save: bool = True) -> dict[int, int | None]:
        """Exit codes."""
        self._processes.end_all(signal.SIGTERM, lambda: can_save)
        return {number: end.code for number, end in self.attempt.ranks.items()}


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Ranks]:
    """With little patience; the signal handlers of the tests come back."""
    monkeypatch.setattr(local_processes, "KILL_SECONDS", 1.0)
    monkeypatch.setattr(local_processes, "SAY_SECONDS", 0.3)
    monkeypatch.setattr(local_processes, "AGAIN_SECONDS", 0.1)
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    yield Ranks(tmp_path)
    for signum, handler in before.items():
        signal.signal(signum, handler)


def test_the_launcher_waits_for_signs_of_life_and_kills_what_gives_none(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.start(0, beats=1.5)
    assert ranks.end() == {0: 143}
    assert not ranks.files.is_hurried()
    assert capsys.readouterr().err.count("waiting for the running step to end and its checkpoint to be saved") == 1
    # one that does not answer is killed, and what the others save is nothing any more
    ranks.start(1, deaf=True)
    ranks.start(2, beats=30.0)
    assert ranks.end() == {0: 143, 1: -signal.SIGKILL, 2: 143}
    assert ranks.files.is_hurried()


@pytest.mark.parametrize("reason", ["a rank has failed", "a rank ends early", "Ctrl-C again"])
def test_ranks_are_told_when_there_is_nothing_to_wait_for(ranks: Ranks, reason: str) -> None:
    ranks.start(0, beats=30.0)
    if reason == "a rank ends early":
        ranks.start(1, beats=0.1, finishes=False)
    if reason == "Ctrl-C again":
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    codes = ranks.end(can_save=reason != "a rank has failed")
    assert time.monotonic() - began < 15.0
    assert set(codes.values()) == {143}
    assert ranks.attempt.is_hurried == (reason == "Ctrl-C again")


def test_an_ignored_interrupt_stays_ignored(ranks: Ranks) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ranks.start(0)
    assert ranks.end() == {0: 143}
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_what_a_terminal_sends_to_all_is_no_second_stop(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_processes, "AGAIN_SECONDS", 5.0)
    ranks.start(0, beats=1.0)
    sent = [
        threading.Timer(seconds, os.kill, (os.getpid(), signum))
        for seconds, signum in ((0.3, signal.SIGINT), (0.4, signal.SIGTERM))
    ]
    for timer in sent:
        timer.start()
    ranks.end()
    for timer in sent:
        timer.join()  # a late one would end the tests' process
    assert not ranks.files.is_hurried()


def test_ranks_and_launcher_tell_each_other_things_through_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLOSSUS_RANK_FILES", raising=False)
    alone = RankFiles()  # without a launcher nobody asks
    alone.beat(3)
    with contextlib.suppress(OSError):
        alone.write_end(RankEnd(3, 0))
    assert not alone.is_hurried()
    monkeypatch.setenv("COLOSSUS_RANK_FILES", "set back")
    with made_rank_files() as files:
        mine = RankFiles()
        assert (files.last_beat(3), files.read_end(3)) == (None, RankEnd(3))
        mine.beat(3)
        mine.write_end(RankEnd(3, 143, kind="finished", progress=[("data", 1)]))
        assert files.last_beat(3) is not None
        assert files.read_end(3) == RankEnd(3, 143, kind="finished", progress=[["data", 1]])
        files.hurry()
        assert mine.is_hurried()
    mine.beat(3)  # the launcher is gone
