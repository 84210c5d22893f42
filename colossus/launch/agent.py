"""One agent per node: starts this node's ranks and servers, waits for their end, or ends them.

How long a rank may take after a stop signal it knows itself (`stop.StopSignals`), and it ends itself then: the launcher
only looks whether it gives signs of life.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import TCPStore

from colossus import machine
from colossus.config import ConfigError
from colossus.launch import failures
from colossus.launch.auto_plan import Planned
from colossus.launch.nodes import Nodes
from colossus.launch.outcome import Outcome
from colossus.launch.rank_processes import RankProcesses, note_stop_signals, on_stop_signals, start_process
from colossus.launch.rendezvous import Rendezvous
from colossus.launch.restarts import Restarts
from colossus.launch.servers import Servers, num_servers
from colossus.launch.stop import STOP_SIGNALS, RankFiles, made_rank_files

RECORD_SECONDS = 0.5
"""From the first failed rank to the stop signal: the culprit is often still writing its record when a victim ends."""

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
    outcome = Outcome(folder=restarts.folder)
    with made_rank_files() as files:
        try:
            _let_signals_raise(outcome)
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


def _let_signals_raise(outcome: Outcome) -> None:
    """Let the first stop signal raise `_Stopped`; another, while that is handled, is noted in the outcome.

    One that is ignored (under nohup, say) stays so.
    """

    def stop(signum: int, frame: object) -> None:
        note_stop_signals(outcome)
        raise _Stopped(signum)

    on_stop_signals(stop)


class _Agent:
    def __init__(self, job: Job, restarts: Restarts, outcome: Outcome, files: RankFiles) -> None:
        self._job, self._restarts, self._outcome = job, restarts, outcome
        self._processes, self._files = RankProcesses(outcome, files), files.folder
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
            outcome.signum = stop.signum
            rendezvous = self._job.rendezvous
            outcome.leaves = rendezvous is not None and rendezvous.can_leave and stop.signum == signal.SIGTERM
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
        words = (str(folder), resume or "", job.config_path, *overrides)
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
            self._processes.all[rank] = start_process("colossus.launch.worker", words, of_rank)
        if self._nodes is not None:
            self._nodes.watch()

    def _agree(self) -> tuple[Path, str | None, str, int]:
        """The run folder, what the ranks resume from, host and port of their store; the first node makes all that."""

        def begin() -> Any:
            host = self._nodes.address if self._nodes is not None else "127.0.0.1"
            if not machine.is_reachable(host):  # torch's store would try for minutes
                raise RuntimeError(
                    f"this machine does not reach its own address {host}: is its interface down? (`ip link set lo up`, "
                    f"of the loopback)"
                )
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
        folders = [] if outcome.folder is None else [self._files, outcome.folder]
        records = itertools.chain.from_iterable(map(failures.read_all, folders))
        outcome.records = [record for record in records if record.rank in outcome.exits]
        if nodes is not None:
            try:
                nodes.conclude(outcome)
            except _Stopped as stop:
                outcome.signum = stop.signum
                nodes.conclude(outcome)
            outcome.gone, outcome.others = nodes.gone(), list(nodes.ends.values())
            nodes.close()
        note_stop_signals(outcome)
        self._servers.close()
