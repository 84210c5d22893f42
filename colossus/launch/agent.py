"""One agent per node, on torch.distributed.elastic: starts this node's workers and waits for their end.

Elastic does the rendezvous and starts the ranks in their environment. Ours are: which ranks exited by themselves
before the others got the stop signal, a short time from that signal to SIGKILL, and silence, since `report` prints one
block in place of elastic's log and traceback.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException

from colossus.config import ConfigError
from colossus.launch import failure, rank_files
from colossus.launch.nodes import Nodes, announce_waiting, meet
from colossus.launch.outcome import NodeEnd, Outcome
from colossus.launch.processes import RankProcesses, ignore_stop_signals
from colossus.launch.rank_files import RankFiles
from colossus.launch.resume import RunStart
from colossus.launch.servers import Servers
from colossus.launch.stop import STOP_SIGNALS

RECORD_SECONDS = 0.5
"""From the first failed rank to the stop signal: the culprit is often still writing its record when a victim ends."""

_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class NodeLaunch:
    """What the launcher of one node is to run.

    Attributes:
        begin: makes the run folder, and says from which checkpoint the run goes on. Called on the first node.
        local_ranks: of each node.
        endpoint: ``host:port`` where the nodes meet; needed when there are several.
        servers: parameter servers of the run.
        server_timeout_seconds: of silence after which a server gives up a worker.
    """

    config_path: str
    overrides: Sequence[str]
    begin: Callable[[], RunStart]
    local_ranks: int
    nodes: int = 1
    endpoint: str | None = None
    servers: int = 0
    server_timeout_seconds: float = 60.0


def run_workers(launch: NodeLaunch) -> Outcome:
    """Start this node's workers and wait until all have ended.

    Raises:
        RuntimeError: when the nodes do not meet (elastic's RendezvousError).
        ConfigError: on all nodes, when the run folder cannot be used.
    """
    # torch's loggers set their own levels, so only cutting them off above works
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    outcome = Outcome()
    with _signals_raise():
        try:
            _run(launch, outcome)
        except SignalException as stop:
            outcome.signum = int(stop.sigval)
    return outcome


def _run(launch: NodeLaunch, outcome: Outcome) -> None:
    notice = announce_waiting(launch.endpoint, launch.nodes) if launch.endpoint is not None else None
    # port 0: the kernel picks a free one
    handler, holds_store = meet(launch.endpoint or "127.0.0.1:0", launch.nodes)
    spec = WorkerSpec(
        role="colossus",
        local_world_size=launch.local_ranks,
        entrypoint=sys.executable,
        args=(),
        rdzv_handler=handler,
        max_restarts=0,
    )
    with rank_files.made() as files:
        agent = _Agent(spec, launch, outcome, files, notice.cancel if notice is not None else lambda: None)
        try:
            agent.run()
        except SignalException as stop:
            outcome.signum = int(stop.sigval)
        finally:
            agent.conclude()
            handler.shutdown()
            agent.close(holds_store)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """A stop signal raises elastic's exception, before its own handlers are there, too; afterwards all is as before."""

    def stop(signum: int, frame: object) -> None:
        raise SignalException(f"the launcher got signal {signum}", signal.Signals(signum))

    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    heard = [signum for signum, handler in before.items() if handler is not signal.SIG_IGN]
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(signum.name for signum in heard)
    for signum in heard:
        signal.signal(signum, stop)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class _Terminal(LogsSpecs):
    """Standard output and error of the workers go where ours go; no files, and no threads that read them."""

    @property
    def root_log_dir(self) -> str:
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        ours = dict.fromkeys(envs, "")
        return LogsDest(stdouts=ours, stderrs=ours, error_files=dict.fromkeys(envs, os.devnull))


class _Agent(LocalElasticAgent):
    """
    Args:
        met: called when all nodes are there.
    """

    def __init__(
        self, spec: WorkerSpec, launch: NodeLaunch, outcome: Outcome, files: RankFiles, met: Callable[[], None]
    ) -> None:
        super().__init__(spec, _Terminal())
        self._launch, self._outcome, self._files, self._met = launch, outcome, files, met
        self._processes = RankProcesses({}, outcome, files)
        self._nodes: Nodes | None = None
        self._servers = Servers()
        self._started: RunStart | None = None

    # -- the start ----------------------------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._met()
        launch, outcome = self._launch, self._outcome
        outcome.folder, resume = self._agree_on_folder(worker_group)
        resumed = ["--resume", resume] if resume is not None else []
        # elastic wants to expand "${local_rank}" in arguments; a "$" of the user's stays as it is
        arguments = ["--run-dir", str(outcome.folder), *resumed, launch.config_path, *launch.overrides]
        worker_group.spec.args = ("-m", "colossus.launch.worker", *(text.replace("$", "$$") for text in arguments))
        if launch.servers:
            self._servers.start(launch.servers, outcome.folder, launch.server_timeout_seconds, self._nodes)
            outcome.endpoints = self._servers.endpoints
        with self._servers.visible_to_workers():
            ids = super()._start_workers(worker_group)
        context: Any = self._pcontext
        handlers = context.subprocess_handlers
        processes = {worker.global_rank: handlers[worker.local_rank].proc for worker in worker_group.workers}
        self._processes = RankProcesses(processes, outcome, self._files)
        if self._nodes is not None:
            self._nodes.watch()
        return ids

    def _agree_on_folder(self, worker_group: WorkerGroup) -> tuple[Path, str | None]:
        """The run folder, and what the ranks resume from."""
        store, num_nodes = worker_group.store, worker_group.group_world_size
        if num_nodes == 1 or store is None:
            self._started = self._launch.begin()
            return self._started.folder, self._started.resume
        ranks = [worker.global_rank for worker in worker_group.workers]
        nodes = self._nodes = Nodes(store, worker_group.group_rank, num_nodes, ranks, self._launch.endpoint or "")
        nodes.use_interface()
        folder, resume, problems = nodes.from_first("begin", self._begin)
        if problems:
            raise ConfigError(problems)
        return Path(folder), resume

    def _begin(self) -> tuple[str, str | None, Sequence[str]]:
        """(run folder, what is resumed, what is wrong), for the other nodes."""
        try:
            self._started = self._launch.begin()
        except ConfigError as error:
            return "", None, error.problems
        return str(self._started.folder.resolve()), self._started.resume, []

    # -- the run ------------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """In place of elastic's loop, which restarts workers and lets nodes come and go, and whose end gives ranks 30 s
        and signals whole process groups: a data loader's processes would die before their rank has finished its step.
        """
        group, outcome = self._worker_group, self._outcome
        self._initialize_workers(group)
        try:
            while not self._is_over():
                time.sleep(_LOOK_SECONDS)
            if self._processes.running():  # they may be about to end by themselves, and to say why
                self._processes.await_ends(RECORD_SECONDS)
        except SignalException as stop:
            ignore_stop_signals()
            outcome.signum = int(stop.sigval)
        self._processes.end_all(outcome.signum or signal.SIGTERM, self._can_save)
        is_good = all(ended.is_good for ended in outcome.exits.values())
        group.state = WorkerState.SUCCEEDED if is_good else WorkerState.FAILED
        return RunResult(group.state, return_values=dict.fromkeys(outcome.exits))

    def _is_over(self) -> bool:
        """Whether all ranks here have ended, or those that run are to be ended."""
        self._processes.note_exits()
        self._processes.warn_of_stragglers()
        if self._server_has_failed():  # asked first: it is why ranks have ended
            return True
        if not self._processes.running() or not all(ended.is_good for ended in self._outcome.exits.values()):
            return True
        return self._nodes is not None and self._nodes.has_trouble()

    def _server_has_failed(self) -> bool:
        """A server of this node has ended before its time."""
        self._outcome.server = self._outcome.server or self._servers.failure()
        return self._outcome.server is not None

    def _can_save(self) -> bool:
        return not self._server_has_failed() and (self._nodes is None or not self._nodes.has_failure())

    # -- the end ------------------------------------------------------------------------------------------

    def conclude(self) -> None:
        """Tell the other nodes how the ranks here ended, and hear how theirs did."""
        nodes, outcome = self._nodes, self._outcome
        if nodes is None:
            return
        try:
            nodes.conclude(self._end_of(nodes))
        except SignalException as stop:
            outcome.signum = int(stop.sigval)
            ignore_stop_signals()
            nodes.conclude(self._end_of(nodes))
        outcome.gone, outcome.others = nodes.gone(), list(nodes.ends.values())

    def _end_of(self, nodes: Nodes) -> NodeEnd:
        outcome = self._outcome
        records = failure.read_all(outcome.folder) if outcome.folder is not None else []
        mine = [record for record in records if record.rank in outcome.exits]
        return NodeEnd(nodes.node, outcome.exits, outcome.signum, mine, outcome.server)

    def close(self, holds_store: bool) -> None:
        """After the last worker of all nodes: the node that holds the store leaves last."""
        if self._nodes is not None:
            self._nodes.close(holds_store)
        ignore_stop_signals()
        self._servers.close()
        for lock in self._started.locks if self._started is not None else ():
            lock.close()
