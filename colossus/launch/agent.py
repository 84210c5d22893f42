"""One agent per node: starts this node's ranks and servers, waits for their end, or ends them.

How long a rank may take after a stop signal it knows itself (`stop.StopSignals`), and it ends itself then: the launcher
only looks whether it gives signs of life.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import TCPStore

from colossus.config import ConfigError
from colossus.launch import failures
from colossus.launch.auto_plan import Planned
from colossus.launch.nodes import Nodes
from colossus.launch.outcome import Outcome, RankExit
from colossus.launch.rendezvous import Rendezvous
from colossus.launch.restarts import Restarts
from colossus.launch.servers import Servers, num_servers
from colossus.launch.stop import GRACE_SECONDS, STOP_SIGNALS, RankFiles, made_rank_files

RECORD_SECONDS = 0.5
"""From the first failed rank to the stop signal: the culprit is often still writing its record when a victim ends."""

KILL_SECONDS = GRACE_SECONDS + 0.5
"""From the stop signal, or the last sign of life, to SIGKILL: workers end themselves before, unless they cannot run."""

SAY_SECONDS = 3.0
"""After which a user who waits for a stop hears what it waits for."""

AGAIN_SECONDS = 1.0
"""After which another Ctrl-C is not the same one any more, which a terminal sends to all processes."""

_LOOK_SECONDS = 0.1
#: between two looks whether nodes have come
_NEWCOMERS_SECONDS = 1.0


class Job(NamedTuple):
    """What is the same on this node in all attempts of a run.

    Attributes:
        plan: of so many nodes that are there: a plan, and how many of them it needs.
        rendezvous: where the nodes meet, None where there is one.
    """

    plan: Callable[[int], tuple[Planned, int]]
    config_path: str
    local_ranks: int
    rendezvous: Rendezvous | None = None


def run_workers(job: Job, restarts: Restarts, before: Outcome | None = None) -> Outcome:
    """Start this node's workers and wait until all have ended. Inside of `kept_signals`.

    Args:
        restarts: where the attempt begins, and its number.
        before: how the attempt before has ended.

    Raises:
        RuntimeError: when the nodes do not meet (elastic's RendezvousError).
        ConfigError: on all nodes, when the run folder cannot be used.
    """
    outcome = Outcome()
    with made_rank_files() as files:
        try:
            _let_signals_raise()
            if before is not None and before.late_signum is not None:
                raise _Stopped(before.late_signum)
            agent = _Agent(job, restarts, outcome, files)
            try:
                agent.run(before.node if before is not None else None)
            finally:
                agent.conclude()
        except _Stopped as stop:
            outcome.signum = stop.signum
    return outcome


class _Stopped(Exception):
    """The launcher got this signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextmanager
def kept_signals() -> Iterator[None]:
    """Whatever stop signals do inside, afterwards they do what they did."""
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _let_signals_raise() -> None:
    """A stop signal raises `_Stopped`; one that is ignored (under nohup, say) stays so."""

    def stop(signum: int, frame: object) -> None:
        raise _Stopped(signum)

    _on_stop_signals(stop)


def _note_stop_signals(outcome: Outcome) -> None:
    """What is left to be done takes no time: a stop signal is only noted."""

    def note(signum: int, frame: object) -> None:
        outcome.late_signum = outcome.late_signum or signum

    _on_stop_signals(note)


def _on_stop_signals(call: Callable[[int, Any], None]) -> None:
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, call)


def start_process(words: Sequence[str], variables: Mapping[str, str]) -> Any:
    """A rank, which prints where we do. A signal to our process group does not reach it, nor its data loaders."""
    return subprocess.Popen([sys.executable, *words], env={**os.environ, **variables}, start_new_session=True)


class _Agent:
    def __init__(self, job: Job, restarts: Restarts, outcome: Outcome, files: RankFiles) -> None:
        self._job, self._restarts, self._outcome = job, restarts, outcome
        self._processes = RankProcesses(outcome, files)
        self._nodes: Nodes | None = None
        self._servers = Servers()
        self._looked = time.monotonic()

    def run(self, before: int | None) -> None:
        """Start the ranks, and wait until all have ended.

        Args:
            before: number of this node in the attempt before.
        """
        outcome = self._outcome
        try:
            self._start(before)
            while not self._is_over():
                time.sleep(_LOOK_SECONDS)
            deadline = time.monotonic() + RECORD_SECONDS
            while self._processes.running() and time.monotonic() < deadline:  # perhaps about to end, and to say why
                self._processes.note_exits()
                time.sleep(0.02)
        except _Stopped as stop:
            _note_stop_signals(outcome)
            outcome.signum = stop.signum
        signum = outcome.signum or signal.SIGTERM
        self._processes.end_all(signum, lambda: not self._others_have_failed(but_stops=True))

    def _start(self, before: int | None) -> None:
        job, outcome = self._job, self._outcome
        if job.rendezvous is not None:
            self._nodes = Nodes(job.rendezvous, before)
            outcome.node = self._nodes.node
        (config, overrides, told), num_nodes = job.plan(self._nodes.num_present if self._nodes is not None else 1)
        ranks = range(job.local_ranks) if self._nodes is None else self._nodes.share(num_nodes, job.local_ranks)
        outcome.config, outcome.is_spare = config, not ranks
        folder, resume, address, port = self._agree()
        outcome.folder = folder
        if told and outcome.node in (None, 0):
            print("\n".join(told), flush=True)
        if number := num_servers(config, num_nodes):
            self._servers.start(number, folder, config.comm.timeout_seconds, self._nodes)
        command = ("-m", "colossus.launch.worker", str(folder), resume or "", job.config_path, *overrides)
        variables = {  # as torchrun sets them
            "WORLD_SIZE": str(num_nodes * job.local_ranks),
            "LOCAL_WORLD_SIZE": str(job.local_ranks),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "colossus",
            "TORCHELASTIC_RESTART_COUNT": str(self._restarts.number),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        for local, rank in enumerate(ranks):
            of_rank = {**variables, "RANK": str(rank), "LOCAL_RANK": str(local)}
            self._processes.all[rank] = start_process(command, of_rank)
        if self._nodes is not None:
            self._nodes.watch()

    def _agree(self) -> tuple[Path, str | None, str, int]:
        """The run folder, what the ranks resume from, host and port of their store; the first node makes all that."""

        def begin() -> Any:
            host = self._nodes.address if self._nodes is not None else "127.0.0.1"
            # the kernel picks a free port
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            try:
                started = self._restarts.begin()
            except ConfigError as error:
                return "", None, [host, self._store.port], None, error.problems
            folder = str(started.folder if self._nodes is None else started.folder.resolve())
            return folder, started.resume, [host, self._store.port], self._restarts.tell(), []

        made = begin() if self._nodes is None else self._nodes.from_first("begin", begin)
        folder, resume, (address, port), known, problems = made
        if problems:
            raise ConfigError(problems)
        self._restarts.hear(Path(folder), known)
        return Path(folder), resume, address, port

    def _is_over(self) -> bool:
        """Whether all ranks here have ended, or those that run are to be ended."""
        self._processes.note_exits()
        if self._others_have_failed() or self._newcomers_wait():  # asked first: it is why ranks have ended
            return True
        if self._nodes is not None and self._outcome.is_spare:
            return self._nodes.has_ended
        return not self._processes.running() or not all(ended.is_good for ended in self._outcome.exits.values())

    def _newcomers_wait(self) -> bool:
        """Whether the ranks of all nodes are to be stopped, since nodes have come. The first node looks."""
        nodes, now = self._nodes, time.monotonic()
        if nodes is None or nodes.node != 0 or now - self._looked < _NEWCOMERS_SECONDS:
            return False
        self._looked = now
        if newcomers := nodes.num_newcomers():
            self._outcome.regroups = self._job.plan(nodes.num_present + newcomers)[1] > nodes.num_nodes
        return self._outcome.regroups

    def _others_have_failed(self, *, but_stops: bool = False) -> bool:
        """Whether a server of this node has ended before its time, or another node is in trouble."""
        self._outcome.server = self._outcome.server or self._servers.failure()
        if self._outcome.server is not None:
            return True
        return self._nodes is not None and self._nodes.has_trouble(but_stops=but_stops)

    def conclude(self) -> None:
        """Tell the other nodes how the ranks here ended, and hear how theirs did. The store's node leaves last."""
        nodes, outcome = self._nodes, self._outcome
        if nodes is not None:
            records = failures.read_all(outcome.folder) if outcome.folder is not None else []
            outcome.records = [record for record in records if record.rank in outcome.exits]
            try:
                nodes.conclude(outcome)
            except _Stopped as stop:
                outcome.signum = stop.signum
                _note_stop_signals(outcome)
                nodes.conclude(outcome)
            outcome.gone, outcome.others = nodes.gone(), list(nodes.ends.values())
            nodes.close()
        _note_stop_signals(outcome)
        self._servers.close()


class RankProcesses:
    """The processes of this node's ranks: which have ended, and how; and how they are ended.

    Args:
        outcome: in which it is noted how they end, and whether a second Ctrl-C has come.

    Attributes:
        all: global rank -> its process, as `subprocess.Popen`.
    """

    def __init__(self, outcome: Outcome, files: RankFiles) -> None:
        self.all: dict[int, Any] = {}
        self._outcome, self._files = outcome, files

    def running(self) -> dict[int, Any]:
        return {rank: process for rank, process in self.all.items() if rank not in self._outcome.exits}

    def note_exits(self) -> None:
        """Record how those have ended that did so by themselves."""
        for rank, process in self.running().items():
            if (code := process.poll()) is not None:
                is_finished = self._files.finished_code(rank) is not None
                self._outcome.exits[rank] = RankExit(code, is_finished=is_finished)

    def end_all(self, signum: int = signal.SIGTERM, can_save: Callable[[], bool] = lambda: True) -> None:
        """End those that still run: the signal, then SIGKILL for those that cannot end themselves.

        Args:
            can_save: asked again and again whether a checkpoint can still be complete, as far as others than these
                ranks decide it.
        """
        self.note_exits()
        if not (left := self.running()):
            return
        exits, files, began = self._outcome.exits, self._files, time.monotonic()

        def again(signum: int, frame: object) -> None:
            self._outcome.late_signum = self._outcome.late_signum or signum
            if time.monotonic() - began > AGAIN_SECONDS:
                files.hurry()
                self._outcome.is_hurried = True

        _note_stop_signals(self._outcome)  # but for a second Ctrl-C, after which nothing is saved
        signal.signal(signal.SIGINT, again)
        for process in left.values():
            process.send_signal(signum)
        beats: dict[int, int | None] = dict.fromkeys(left)
        deadlines = dict.fromkeys(left, began + KILL_SECONDS)
        is_saving, has_spoken = True, False
        while left := self.running():
            now = time.monotonic()
            if is_saving and not (can_save() and all(ended.is_finished for ended in exits.values())):
                is_saving = False
                files.hurry()
            for rank, process in left.items():
                if (beat := files.last_beat(rank)) != beats[rank]:
                    beats[rank], deadlines[rank] = beat, now + KILL_SECONDS
                is_killed = process.poll() is None and now >= deadlines[rank]
                if is_killed:  # with all processes of its own
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                if process.poll() is not None:
                    code, announced = process.returncode, files.finished_code(rank)
                    if is_killed and announced is not None:
                        code = announced  # Python takes seconds to take torch apart: nothing is lost with it
                    by_somebody_else = code == -signal.SIGKILL and not is_killed
                    exits[rank] = RankExit(code, not by_somebody_else, is_finished=announced is not None)
            if is_saving and not has_spoken and now - began > SAY_SECONDS and any(beats[rank] for rank in left):
                has_spoken = True
                said = "waiting for the running step to end and its checkpoint to be saved (Ctrl-C again: do not wait)"
                print(f"colossus: {said}", file=sys.stderr, flush=True)
            time.sleep(0.02)
        _note_stop_signals(self._outcome)
