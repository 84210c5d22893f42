"""The agent of a node: it starts the node's ranks and servers, waits for their end or ends them, attempt by attempt.

After a stop signal a rank ends itself at the end of its grace period (`stop.StopSignals`). The launcher only watches
its heartbeats.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import TCPStore

from colossus import machine
from colossus.config import Config, ConfigError
from colossus.config.resolved import write_resolved
from colossus.context.grid import build_grid
from colossus.launch import run_folder
from colossus.launch.attempts import Attempts
from colossus.launch.auto_plan import Planned
from colossus.launch.decide import Stop, decide
from colossus.launch.ends import STOP_SIGNALS, AttemptEnd
from colossus.launch.lasting_output import lasting_output
from colossus.launch.local_processes import (
    LocalProcesses,
    RankFiles,
    made_rank_files,
    note_stop_signals,
    on_stop_signals,
    start_process,
)
from colossus.launch.memory_folder import open_memory_folder
from colossus.launch.nodes import Nodes
from colossus.launch.rendezvous import Rendezvous
from colossus.launch.report import report, unsaved_step
from colossus.launch.resume import RunStart
from colossus.launch.servers import num_servers, start_servers

#: the time from the first failed rank to the stop signal: the culprit may still write its record when a victim ends
RECORD_SECONDS = 0.5

_LOOK_SECONDS = 0.1
#: the interval at which the first node looks for new nodes
_NEWCOMERS_SECONDS = 1.0


class Job(NamedTuple):
    """The facts of a run that are the same in all of its attempts on this node.

    Attributes:
        plan: a function of the number of nodes that returns a plan and the number of nodes that it uses.
        stated: what the config file and the overrides say.
        words: the config file and the overrides.
        local_ranks: the ranks of each node.
        rendezvous: the rendezvous of the nodes; None where there is one node.
    """

    plan: Callable[[int], tuple[Planned, int]]
    stated: Config
    words: tuple[str, ...]
    local_ranks: int
    rendezvous: Rendezvous | None = None


@lasting_output()
def run_attempts(job: Job, config: Config, begin: Callable[[], RunStart]) -> int:
    """Run this node's workers until they have finished, or have failed for the last time; report on each attempt.

    Args:
        job: the work of this node.
        config: the resolved config for the largest number of nodes.
        begin: makes and locks the run folder, and returns the checkpoint from which the run resumes. Called on the
            first node.

    Returns:
        The exit code of the last attempt.

    Raises:
        RuntimeError: see `run_workers`.
        ConfigError: see `run_workers`.
    """
    attempts, limits, end = Attempts(begin), config.launch.restarts, None
    with restored_signals(), open_memory_folder(config):
        try:
            while True:
                end = run_workers(job, attempts, end)
                decision = decide(end, attempts.history, limits, time.time())
                decision = attempts.record(end, decision)
                plan = end.config or config
                report(end, decision, plan, build_grid(plan.parallel), limits.max if limits is not None else 0)
                if isinstance(decision, Stop):
                    return decision.code
        finally:
            if job.rendezvous is not None and not (end is not None and end.leaves):
                job.rendezvous.close()
            attempts.close()


def run_workers(job: Job, attempts: Attempts, before: AttemptEnd | None = None) -> AttemptEnd:
    """Start this node's workers and wait until all have ended. Called inside `restored_signals`.

    Args:
        job: the work of this node.
        attempts: the beginning of the attempt, and its number.
        before: the end of the previous attempt.

    Raises:
        RuntimeError: the nodes do not come together in time (elastic's RendezvousError).
        ConfigError: on all nodes, where the run folder cannot be used.
    """
    end = AttemptEnd(folder=attempts.folder)
    with made_rank_files() as files:
        try:
            _let_signals_raise(end)
            if before is not None and before.late_signum is not None:
                raise _Stopped(before.late_signum)
            agent = _Agent(job, attempts, end, files)
            try:
                agent.run(before.node if before is not None else None)
            finally:
                agent.conclude()
        except _Stopped as stop:
            end.signum = stop.signum
    return end


class _Stopped(Exception):
    """The exception of a stop signal in the launcher."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextmanager
def restored_signals() -> Iterator[None]:
    """Restore the handlers of the stop signals at the end of the block."""
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _let_signals_raise(end: AttemptEnd) -> None:
    """Let the first stop signal raise `_Stopped`, and another one be noted in the attempt's end.

    A signal that is ignored (under nohup, say) stays so.
    """

    def stop(signum: int, frame: object) -> None:
        note_stop_signals(end)
        raise _Stopped(signum)

    on_stop_signals(stop)


class _Agent:
    def __init__(self, job: Job, attempts: Attempts, end: AttemptEnd, files: RankFiles) -> None:
        self._job, self._attempts, self._end, self._files = job, attempts, end, files
        self._processes = LocalProcesses(end, files)
        self._nodes: Nodes | None = None
        self._looked = time.monotonic()

    def run(self, before: int | None) -> None:
        """Start the ranks, and wait until all have ended.

        Args:
            before: the number of this node in the previous attempt, or None.
        """
        end = self._end
        try:
            self._start(before)
            while not self._is_over():
                time.sleep(_LOOK_SECONDS)
            deadline = time.monotonic() + RECORD_SECONDS
            while self._processes.running() and time.monotonic() < deadline:  # a rank may be writing its record
                self._processes.note_exits()
                time.sleep(0.02)
        except _Stopped as stop:
            end.signum = stop.signum
            rendezvous = self._job.rendezvous
            end.leaves = rendezvous is not None and rendezvous.can_leave and stop.signum == signal.SIGTERM
        finally:  # ranks do not outlive an error here
            signum = end.signum or signal.SIGTERM
            self._processes.end_all(signum, lambda: not self._others_have_failed(but_stops=True))

    def _start(self, before: int | None) -> None:
        job, end = self._job, self._end
        if job.rendezvous is not None:
            self._nodes = Nodes(job.rendezvous, before)
            end.node = self._nodes.node
        (config, lines), num_nodes = job.plan(self._nodes.num_present if self._nodes is not None else 1)
        ranks = range(job.local_ranks) if self._nodes is None else self._nodes.share(num_nodes, job.local_ranks)
        end.config, end.is_spare = config, not ranks
        folder, resume, address, port = self._agree()
        end.folder = folder
        if lines and end.node in (None, 0):
            print("\n".join(lines), flush=True)
        if number := num_servers(config, num_nodes):
            start_servers(self._processes.servers, number, folder, config.comm.timeout_seconds, self._nodes)
        resolved = self._files.folder / run_folder.RESOLVED  # on this host, since the disk of the run may be full
        if ranks:
            name = run_folder.RESOLVED if not end.node else f"node-{end.node}-{run_folder.RESOLVED}"
            write_resolved(resolved, config, job.stated, folder / name)
        words = (str(folder), resume or "", str(resolved), *job.words)
        variables = {  # those that torchrun sets
            "WORLD_SIZE": str(num_nodes * job.local_ranks),
            "LOCAL_WORLD_SIZE": str(job.local_ranks),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": self._attempts.launch,
            "TORCHELASTIC_RESTART_COUNT": str(self._attempts.number),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        for local, rank in enumerate(ranks):
            of_rank = {**variables, "RANK": str(rank), "LOCAL_RANK": str(local)}
            self._processes.ranks[rank] = start_process("colossus.launch.worker", words, of_rank)
        if self._nodes is not None:
            self._nodes.watch()

    def _agree(self) -> tuple[Path, str | None, str, int]:
        """Return the run folder, the ranks' checkpoint, and host and port of their store, made by the first node."""

        def begin() -> Any:
            host = self._nodes.address if self._nodes is not None else "127.0.0.1"
            if not machine.is_reachable(host):  # torch's store would retry for minutes
                raise RuntimeError(
                    f"this machine does not reach its own address {host}: is its interface down? (`ip link set lo up`, "
                    f"of the loopback)"
                )
            self._store = _open_store(host, only_here=self._nodes is None)
            try:
                start = self._attempts.begin()
            except ConfigError as error:
                return "", None, [host, self._store.port], None, error.problems
            folder = str(start.folder if self._nodes is None else start.folder.resolve())
            return folder, start.resume, [host, self._store.port], self._attempts.shared(), []

        agreed = begin() if self._nodes is None else self._nodes.from_first("begin", begin)
        folder, resume, (address, port), history, problems = agreed
        if problems:
            raise ConfigError(problems)
        if self._nodes is not None:
            self._attempts.receive(Path(folder), history)
        return Path(folder), resume, address, port

    def _is_over(self) -> bool:
        """Return whether all ranks here have ended, or those that still run must be ended."""
        self._processes.note_exits()
        if self._others_have_failed() or self._newcomers_wait():  # first, since it may be why ranks here have ended
            return True
        if self._nodes is not None and self._end.is_spare:
            return self._nodes.has_ended
        return not self._processes.running() or not all(end.is_good for end in self._end.ranks.values())

    def _newcomers_wait(self) -> bool:
        """Return whether all ranks must be stopped, since new nodes can take part; only the first node looks."""
        nodes, now = self._nodes, time.monotonic()
        if nodes is None or nodes.node != 0 or now - self._looked < _NEWCOMERS_SECONDS:
            return False
        self._looked = now
        if newcomers := nodes.num_newcomers():
            self._end.regroups = self._job.plan(nodes.num_present + newcomers)[1] > nodes.num_nodes
        return self._end.regroups

    def _others_have_failed(self, *, but_stops: bool = False) -> bool:
        """Return whether a server of this node has died, or another node is in trouble."""
        self._processes.note_servers()
        if self._end.server is not None:
            return True
        return self._nodes is not None and self._nodes.has_trouble(but_stops=but_stops)

    def conclude(self) -> None:
        """Report the end of this node's ranks to the other nodes, and receive theirs. The store's node leaves last."""
        nodes, end = self._nodes, self._end
        if nodes is not None:
            try:
                nodes.conclude(end)
            except _Stopped as stop:
                end.signum = stop.signum
                nodes.conclude(end)
            end.gone, end.others = nodes.gone(), dict(nodes.ends)
            nodes.close()
        note_stop_signals(end)
        self._processes.close()
        if end.config is not None and end.folder is not None:
            end.unsaved_step = unsaved_step(end.config, end.folder, end.started)


def _open_store(host: str, *, only_here: bool) -> TCPStore:
    """Open the store of the ranks at a free port.

    Args:
        host: address at which the ranks reach it.
        only_here: all ranks are on this machine: no other machine can connect. Ranks unpickle what the store brings.
    """
    if not only_here:
        return TCPStore(host, 0, is_master=True, wait_for_workers=False)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        listener.listen(socket.SOMAXCONN)
        port = listener.getsockname()[1]
        return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
