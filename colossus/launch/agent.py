"""One agent per node, on torch.distributed.elastic: starts this node's workers and waits for their end.

Elastic does the rendezvous, the environment of each rank and the monitoring. Ours are: which ranks exited by themselves
before the others got the stop signal, a short time from that signal to SIGKILL, and silence, since ``causes`` prints
one block in place of elastic's log and traceback.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from colossus.config import ConfigError
from colossus.launch import elastic, failure, finished
from colossus.launch.causes import RankExit
from colossus.launch.ending import are_finished, ignore_stop_signals
from colossus.launch.lingering import Lingering
from colossus.launch.node_launch import NodeLaunch
from colossus.launch.nodes import NodeEnd, Nodes
from colossus.launch.origin import Taken
from colossus.launch.outcome import Outcome
from colossus.launch.rank_processes import RankProcesses
from colossus.launch.rendezvous import awaiting, meet, own_address, use_interface_of
from colossus.launch.servers import Servers
from colossus.launch.stop import STOP_SIGNALS

RECORD_SECONDS = 0.5
"""From the first failed rank to the stop signal: the culprit is often still writing its record when a victim ends."""


def run_workers(launch: NodeLaunch) -> Outcome:
    """Start this node's workers and wait until all have ended.

    Raises:
        RuntimeError: when the nodes do not meet (elastic's RendezvousError).
        ConfigError: on all nodes, when the run folder cannot be used.
    """
    elastic.silence()
    notice = awaiting(launch.endpoint, launch.nodes) if launch.endpoint is not None else None
    # port 0: the kernel picks a free one
    handler, holds_store = meet(launch.endpoint or "127.0.0.1:0", launch.nodes)
    spec = WorkerSpec(
        role="colossus",
        local_world_size=launch.local_ranks,
        entrypoint=sys.executable,
        args=(),
        rdzv_handler=handler,
        max_restarts=0,
        monitor_interval=0.1,
    )
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(
        signum.name for signum in STOP_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN
    )
    with finished.expected() as marks:
        agent = _Agent(spec, launch, marks, notice.cancel if notice is not None else lambda: None)
        try:
            agent.run()
        except SignalException as stop:
            agent.outcome.signum = int(stop.sigval)
        finally:
            agent.conclude()
            handler.shutdown()
            agent.leave(holds_store)
            agent.close_servers()
    return agent.outcome


class _Agent(LocalElasticAgent):
    """
    Args:
        marks: the folder in which ranks leave marks (`finished`).
        met: called when all nodes are there.
    """

    def __init__(self, spec: WorkerSpec, launch: NodeLaunch, marks: Path, met: Callable[[], None]) -> None:
        super().__init__(spec, elastic.Terminal())
        self._launch, self._marks, self._met = launch, marks, met
        self.outcome = Outcome()
        self._processes = RankProcesses({}, self.outcome.exits, marks)
        self._lingering = Lingering(marks)
        self._nodes: Nodes | None = None
        self._servers = Servers()
        self._taken: Taken | None = None  # its locks must live as long as the ranks

    # -- the start ----------------------------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._met()
        self.outcome.folder, resume = self._agree_on_folder(worker_group)
        resumed = ["--resume", resume] if resume is not None else []
        # elastic wants to expand "${local_rank}" in arguments; a "$" of the user's stays as it is
        launch = self._launch
        arguments = ["--run-dir", str(self.outcome.folder), *resumed, launch.config_path, *launch.overrides]
        worker_group.spec.args = ("-m", "colossus.launch.worker", *(text.replace("$", "$$") for text in arguments))
        if launch.servers:
            self._servers.start(
                launch.servers, self.outcome.folder, launch.server_timeout_seconds, worker_group.store, self._nodes
            )
            self.outcome.endpoints = self._servers.endpoints
        self._servers.tell_workers()
        ids = super()._start_workers(worker_group)
        self._servers.forget()
        context: Any = self._pcontext
        handlers = context.subprocess_handlers
        processes = {worker.global_rank: handlers[worker.local_rank].proc for worker in worker_group.workers}
        self._processes = RankProcesses(processes, self.outcome.exits, self._marks)
        # Elastic's own close gives every rank 30 s and signals whole process groups: a data loader's processes
        # would die of the signal before their rank has finished its step.
        elastic_close = context.close

        def close(death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
            if death_sig is None:  # a rank has failed by itself: others may be about to, and to say why
                self._processes.await_ends(RECORD_SECONDS)
            self._end_all(death_sig or signal.SIGTERM)
            elastic_close(death_sig, 1)  # no process is left to signal; it frees its resources

        context.close = close
        if self._nodes is not None:
            self._nodes.watch()
        return ids

    def _agree_on_folder(self, worker_group: WorkerGroup) -> tuple[Path, str | None]:
        """The run folder, and what the ranks resume from."""
        store = worker_group.store
        if worker_group.group_world_size == 1 or store is None:
            taken = self._taken = self._launch.begin()
            return taken.folder, taken.resume
        ranks = [worker.global_rank for worker in worker_group.workers]
        guess = own_address(self._launch.endpoint or "")
        self._nodes = Nodes(store, worker_group.group_rank, worker_group.group_world_size, ranks, guess)
        use_interface_of(self._nodes.address)
        if worker_group.group_rank == 0:
            store.set("colossus/begin", json.dumps(self._begun()))
        folder, resume, problems = json.loads(store.get("colossus/begin"))
        if problems:
            raise ConfigError(problems)
        return Path(folder), resume

    def _begun(self) -> tuple[str, str | None, Sequence[str]]:
        """(run folder, what is resumed, what is wrong), for the other nodes."""
        try:
            taken = self._taken = self._launch.begin()
        except ConfigError as error:
            return "", None, error.problems
        return str(taken.folder.resolve()), taken.resume, []

    # -- the run ------------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Elastic's loop without restarts and without nodes that come and go; other nodes' ends are heard of."""
        group = self._worker_group
        self._initialize_workers(group)
        while True:
            time.sleep(group.spec.monitor_interval)
            server_failed = self._server_has_failed()
            result = self._monitor_workers(group) if not server_failed else RunResult(WorkerState.FAILED)
            group.state = result.state
            if result.state is WorkerState.SUCCEEDED:
                return result
            if result.state is WorkerState.HEALTHY and (self._nodes is None or not self._nodes.has_trouble()):
                continue
            self._processes.await_ends(RECORD_SECONDS)  # they may be about to end by themselves, and to say why
            self._stop_workers(group)
            group.state = WorkerState.FAILED
            return RunResult(WorkerState.FAILED)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._lingering.look(self._processes.ranks)
        return super()._monitor_workers(worker_group)

    def _server_has_failed(self) -> bool:
        """A server of this node has ended before its time; all nodes hear of it."""
        failure = self._servers.failure()
        if failure is not None and self.outcome.server is None:
            self.outcome.server = failure
            if self._nodes is not None:
                self._nodes.tell_server_failure(failure)
        return failure is not None

    def _read_records(self) -> list[failure.FailureRecord]:
        return failure.read_all(self.outcome.folder) if self.outcome.folder is not None else []

    # -- the end ------------------------------------------------------------------------------------------

    def _end_all(self, signum: int) -> None:
        """End the ranks that still run, and record how each ended."""
        has_failed = self._server_has_failed() or (self._nodes is not None and self._nodes.has_failure())

        def look(exits: Mapping[int, RankExit]) -> bool:
            return not self._server_has_failed() and are_finished(exits)

        def when_hurried() -> None:
            self.outcome.is_hurried = True

        self._processes.end_all(signum, has_failed=has_failed, when_hurried=when_hurried, look=look)

    def conclude(self) -> None:
        """Tell the other nodes how the ranks here ended, and hear how theirs did."""
        nodes, outcome = self._nodes, self.outcome
        if nodes is None:
            return
        try:
            nodes.conclude(self._end_of(nodes), self._server_has_failed)
        except SignalException as stop:
            outcome.signum = int(stop.sigval)
            ignore_stop_signals()
            nodes.conclude(self._end_of(nodes), self._server_has_failed)
        outcome.server = outcome.server or nodes.server_failure
        outcome.gone, outcome.others = nodes.gone(), list(nodes.ends.values())

    def _end_of(self, nodes: Nodes) -> NodeEnd:
        exits = self.outcome.exits
        records = [record for record in self._read_records() if record.rank in exits]
        return NodeEnd(nodes.node, nodes.host, exits, self.outcome.signum, records)

    def close_servers(self) -> None:
        """After the last worker of all nodes."""
        ignore_stop_signals()
        self._servers.close()

    def leave(self, holds_store: bool) -> None:
        """The last use of the store: the node that holds it leaves last."""
        if self._nodes is not None:
            self._nodes.close(holds_store)
