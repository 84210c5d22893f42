"""The processes that a node's launcher starts, watches and ends: ranks and parameter servers. No torch.

`colossus.context.local_ranks` is no second supervisor of runs: it forks functions of tests, benchmarks and tools, which
answer through pipes, save nothing and are killed at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from colossus.launch.ends import GRACE_SECONDS, STOP_SIGNALS, AttemptEnd, RankEnd
from colossus.launch.memory_folder import remove_memory
from colossus.launch.servers import describe_dead_server
from colossus.python_process import kill_with_children, start_python
from colossus.server.process import ServerProcess

#: the time from the stop signal, or the last heartbeat, to SIGKILL; workers that can run end themselves before
KILL_SECONDS = GRACE_SECONDS + 0.5

#: the time after which a line tells the user what a stop waits for
SAY_SECONDS = 3.0

#: the time after which a Ctrl-C counts as a second one; a terminal sends the first to all processes
AGAIN_SECONDS = 1.0


_RANK_FILES = "COLOSSUS_RANK_FILES"


class RankFiles:
    """Files through which the ranks of a node and their launcher communicate, also when one of them has gone.

    A rank writes its end, also when it has come to the end of its program: an exit code of 0 does not show that, since
    ``os._exit(0)`` in a model or a library gives it, too. A rank that was stopped and still works on a step or a
    checkpoint writes heartbeats. The launcher writes a file when a checkpoint can not be complete any more.

    Args:
        folder: by default that of the launcher that has started this process; without a launcher, nothing is written
            and nothing is read.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(os.environ.get(_RANK_FILES, os.devnull))

    def write_end(self, end: RankEnd) -> None:
        """Write the end of a rank, which is about to exit; readers see all of it or nothing.

        Raises:
            OSError: it cannot be written.
        """
        draft = self.folder / f"{end.rank}.draft"
        draft.write_text(json.dumps(end.facts()))
        draft.replace(self.folder / f"{end.rank}.end")

    def read_end(self, rank: int) -> RankEnd:
        """Return the end of a rank as far as it has written it."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return RankEnd(**json.loads((self.folder / f"{rank}.end").read_text()))
        return RankEnd(rank)

    def beat(self, rank: int) -> None:
        """Write a heartbeat of a rank that was stopped and still works."""
        self._write(f"{rank}.beat")

    def hurry(self) -> None:
        """Tell the ranks to end without a checkpoint: it cannot be complete, or the user does not want it."""
        self._write("hurry")

    def is_hurried(self) -> bool:
        return (self.folder / "hurry").exists()

    def last_beat(self, rank: int) -> int | None:
        """Return a number that changes with each heartbeat of a rank; None before the first."""
        with contextlib.suppress(OSError):
            return (self.folder / f"{rank}.beat").stat().st_mtime_ns
        return None

    def remove(self) -> None:
        """Remove the files; for a rank whose launcher was killed."""
        remove_memory()
        if self.folder.is_dir():
            shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self.folder / name).write_text("")


@contextmanager
def made_rank_files() -> Iterator[RankFiles]:
    """Make the files of the ranks that a launcher starts inside; the folder is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="colossus-ranks-") as folder:
        os.environ[_RANK_FILES] = folder
        yield RankFiles()


def note_stop_signals(attempt: AttemptEnd) -> None:
    """Let stop signals only be noted in the attempt's end, since the remaining work takes no time."""

    def note(signum: int, frame: object) -> None:
        attempt.late_signum = attempt.late_signum or signum

    on_stop_signals(note)


def on_stop_signals(call: Callable[[int, Any], None]) -> None:
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, call)


def start_process(module: str, words: Sequence[str], variables: Mapping[str, str]) -> Any:
    """Start a rank with our output. Signals to our process group do not reach it or its data loaders."""
    return start_python(module, *words, env={**os.environ, **variables})


class LocalProcesses:
    """The ranks and parameter servers of this node.

    Args:
        attempt: records how they end, and whether a second Ctrl-C has come.
        files: the files through which ranks and launcher communicate.

    Attributes:
        ranks: global rank -> its process, a `subprocess.Popen`.
        servers: the parameter servers.
    """

    def __init__(self, attempt: AttemptEnd, files: RankFiles) -> None:
        self.ranks: dict[int, Any] = {}
        self.servers: list[ServerProcess] = []
        self._attempt, self._files = attempt, files

    def running(self) -> dict[int, Any]:
        """Return the ranks that have not ended."""
        return {rank: process for rank, process in self.ranks.items() if rank not in self._attempt.ranks}

    def note_exits(self) -> None:
        """Record the ends of ranks that have ended by themselves."""
        for rank, process in self.running().items():
            if (code := process.poll()) is not None:
                self._attempt.ranks[rank] = replace(self._files.read_end(rank), code=code)

    def note_servers(self) -> None:
        """Record the death of a server, the first one."""
        dead = next((server for server in self.servers if not server.alive), None)
        if dead is not None and self._attempt.server is None:
            self._attempt.server = describe_dead_server(dead)

    def end_all(self, signum: int = signal.SIGTERM, can_save: Callable[[], bool] = lambda: True) -> None:
        """End the ranks that still run: by the signal, then by SIGKILL where a rank cannot end itself.

        Args:
            signum: the signal.
            can_save: returns whether a checkpoint can still be complete, as far as other nodes decide it; called again
                and again.
        """
        self.note_exits()
        if not (running := self.running()):
            return
        ends, files, began = self._attempt.ranks, self._files, time.monotonic()

        def again(signum: int, frame: object) -> None:
            self._attempt.late_signum = self._attempt.late_signum or signum
            if time.monotonic() - began > AGAIN_SECONDS:
                files.hurry()
                self._attempt.is_hurried = True

        note_stop_signals(self._attempt)  # except a second Ctrl-C, after which nothing is saved
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, again)
        for process in running.values():
            process.send_signal(signum)
        beats: dict[int, int | None] = dict.fromkeys(running)
        deadlines = dict.fromkeys(running, began + KILL_SECONDS)
        is_saving, has_spoken = True, False
        while running := self.running():
            now = time.monotonic()
            if is_saving and not (can_save() and all(end.kind == "finished" for end in ends.values())):
                is_saving = False
                files.hurry()
            for rank, process in running.items():
                if (beat := files.last_beat(rank)) != beats[rank]:
                    beats[rank], deadlines[rank] = beat, now + KILL_SECONDS
                is_killed = process.poll() is None and now >= deadlines[rank]
                if is_killed:  # together with its child processes
                    kill_with_children(process)
                if process.poll() is not None:
                    code, end = process.returncode, files.read_end(rank)
                    if is_killed and end.kind == "finished" and end.code is not None:
                        code = end.code  # it had finished; only the teardown of torch, which takes seconds, was cut
                    by_another = code == -signal.SIGKILL and not is_killed
                    ends[rank] = replace(end, code=code, after_stop=not by_another)
            if is_saving and not has_spoken and now - began > SAY_SECONDS and any(beats[rank] for rank in running):
                has_spoken = True
                text = "waiting for the running step to end and its checkpoint to be saved (Ctrl-C again: do not wait)"
                print(f"colossus: {text}", file=sys.stderr, flush=True)
            time.sleep(0.02)
        note_stop_signals(self._attempt)

    def close(self) -> None:
        """End the servers."""
        if self.servers:
            with ThreadPoolExecutor(len(self.servers)) as pool:
                list(pool.map(lambda server: server.close(), self.servers))
