"""One agent per node, on torch.distributed.elastic: starts this node's workers and waits for their end.

Elastic does the rendezvous, the environment of each rank and the monitoring. Ours are: which ranks exited by themselves
before the others got the stop signal, a short time from that signal to SIGKILL, and silence, since ``causes`` prints
one block in place of elastic's log and traceback.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from threading import Timer
from typing import Any

from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException

from colossus.config import ConfigError
from colossus.context.death_board import DEATH_STORE, connect
from colossus.context.grid import RankGrid
from colossus.launch import failure, finished
from colossus.launch.causes import RankExit
from colossus.launch.deaths import Deaths
from colossus.launch.ending import end_processes, ignore_stop_signals, kill, none_if_unfinished
from colossus.launch.nodes import LINGER_SECONDS, NodeEnd, Nodes
from colossus.launch.origin import Taken
from colossus.launch.rendezvous import awaiting, meet, own_address, use_interface_of
from colossus.launch.stop import STOP_SIGNALS

_STORE_TIMEOUT = timedelta(seconds=60)

RECORD_SECONDS = 0.5
"""From the first failed rank to the stop signal: the culprit is often still writing its record when a victim ends."""


@dataclass
class Outcome:
    """How this node's ranks ended.

    Attributes:
        exits: global rank -> how its process ended.
        signum: the signal the launcher itself received, None when the ranks ended otherwise.
        is_hurried: a second Ctrl-C has asked to end without a checkpoint.
        folder: the run folder all nodes agreed on, None before they have.
        others: how the ranks of other nodes ended, as far as they have said.
        gone: the nodes that give no sign of life any more, in words.
        lost: ranks that the run went on without.
        losses: of them, for the report.
        verdict: why the run could not go on without a rank that died, where it might have.
    """

    folder: Path | None = None
    exits: dict[int, RankExit] = field(default_factory=dict)
    signum: int | None = None
    is_hurried: bool = False
    others: Sequence[NodeEnd] = ()
    gone: Sequence[str] = ()
    lost: Collection[int] = ()
    losses: Sequence[Mapping[str, Any]] = ()
    verdict: str | None = None


def run_workers(
    config_path: str,
    overrides: list[str],
    *,
    local_ranks: int,
    begin: Callable[[], Taken],
    nodes: int = 1,
    endpoint: str | None = None,
    survives: RankGrid | None = None,
) -> Outcome:
    """Start ``local_ranks`` workers on this node and wait until all have ended.

    Args:
        begin: makes the run folder, and says from which checkpoint the run goes on. Called on the first node.
        endpoint: ``host:port`` where the nodes meet; needed when there are several.
        survives: the plan of a run that goes on without replicas that die; None where a death ends the run.

    Raises:
        RuntimeError: when the nodes do not meet (elastic's RendezvousError).
        ConfigError: on all nodes, when the run folder cannot be used.
    """
    _silence_elastic()
    # port 0: the kernel picks a free one
    notice = awaiting(endpoint, nodes) if endpoint is not None else None
    handler, holds_store = meet(endpoint or "127.0.0.1:0", nodes)
    spec = WorkerSpec(
        role="colossus",
        local_world_size=local_ranks,
        entrypoint=sys.executable,
        args=(),
        rdzv_handler=handler,
        max_restarts=0,
        monitor_interval=0.1,
    )
    agent = _Agent(spec, config_path, overrides, begin, notice, endpoint, survives)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(
        signum.name for signum in STOP_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN
    )
    with finished.expected() as folder_of_marks:
        agent.marks = folder_of_marks
        try:
            agent.run()
        except SignalException as stop:
            agent.outcome.signum = int(stop.sigval)
        finally:
            agent.conclude()
            handler.shutdown()
            agent.leave(holds_store)
    return agent.outcome


class _Terminal(LogsSpecs):
    """Standard output and error of the workers go where ours go; no files, and no threads that read them."""

    @property
    def root_log_dir(self) -> str:
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        ours = dict.fromkeys(envs, "")
        return LogsDest(stdouts=ours, stderrs=ours, error_files=dict.fromkeys(envs, os.devnull))


class _Agent(LocalElasticAgent):
    def __init__(
        self,
        spec: WorkerSpec,
        config_path: str,
        overrides: list[str],
        begin: Callable[[], Taken],
        notice: Timer | None,
        endpoint: str | None,
        survives: RankGrid | None,
    ) -> None:
        super().__init__(spec, _Terminal())
        self._endpoint = endpoint
        self._config_path, self._overrides = config_path, overrides
        self._begin = begin
        self.outcome = Outcome()
        self.marks: Path | None = None
        self._first_finished: float | None = None
        self._has_reported_lingering = False
        self._nodes: Nodes | None = None
        self._survives = survives
        self._deaths: Deaths | None = None
        self._notice = notice
        self._taken: Taken | None = None  # its locks must live as long as the ranks

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Elastic's loop without restarts and without nodes that come and go; other nodes' ends are heard of."""
        group = self._worker_group
        self._initialize_workers(group)
        while True:
            time.sleep(group.spec.monitor_interval)
            result = self._monitor_workers(group)
            group.state = result.state
            if result.state is WorkerState.SUCCEEDED:
                return result
            if result.state is WorkerState.HEALTHY and (self._nodes is None or not self._nodes.has_trouble()):
                continue
            self._await_ends(RECORD_SECONDS)  # they may be about to end by themselves, and to say why
            self._stop_workers(group)
            group.state = WorkerState.FAILED
            return RunResult(WorkerState.FAILED)

    def conclude(self) -> None:
        """Tell the other nodes how the ranks here ended, and hear how theirs did."""
        nodes, outcome, deaths = self._nodes, self.outcome, self._deaths
        if deaths is not None:
            self._judge_last(deaths)
        try:
            self._conclude(nodes, outcome)
        finally:
            if deaths is not None:
                with suppress(RuntimeError):  # the store has gone
                    deaths.look(outcome.exits)
                    outcome.losses = deaths.told()
                outcome.lost = deaths.lost
                if outcome.signum is None or deaths.has_culprit:
                    outcome.verdict = deaths.verdict

    def _judge_last(self, deaths: Deaths) -> None:
        """A rank may have died just before the last of the others had ended."""
        deadline = time.monotonic() + 2 * RECORD_SECONDS
        with suppress(RuntimeError, SignalException):
            deaths.look(self.outcome.exits)
            while deaths.verdict is None and deaths.is_suspicious and time.monotonic() < deadline:
                time.sleep(0.05)
                deaths.look(self.outcome.exits)

    def _conclude(self, nodes: Nodes | None, outcome: Outcome) -> None:
        if nodes is None:
            return
        try:
            nodes.conclude(self._end_of(nodes))
        except SignalException as stop:
            outcome.signum = int(stop.sigval)
            ignore_stop_signals()
            nodes.conclude(self._end_of(nodes))
        outcome.gone, outcome.others = nodes.gone(), list(nodes.ends.values())

    def leave(self, holds_store: bool) -> None:
        """The last use of the store: the node that holds it leaves last."""
        if self._nodes is not None:
            self._nodes.close(holds_store)

    def _end_of(self, nodes: Nodes) -> NodeEnd:
        exits = self.outcome.exits
        folder = self.outcome.folder
        records = [record for record in failure.read_all(folder) if record.rank in exits] if folder is not None else []
        lost = sorted(self._deaths.lost) if self._deaths is not None else []
        return NodeEnd(nodes.node, nodes.host, exits, self.outcome.signum, records, lost)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._notice is not None:
            self._notice.cancel()
        self.outcome.folder, resume = self._agree_on_folder(worker_group)
        resumed = ["--resume", resume] if resume is not None else []
        # elastic wants to expand "${local_rank}" in arguments; a "$" of the user's stays as it is
        arguments = ["--run-dir", str(self.outcome.folder), *resumed, self._config_path, *self._overrides]
        worker_group.spec.args = ("-m", "colossus.launch.worker", *(text.replace("$", "$$") for text in arguments))
        address = f"{worker_group.master_addr}:{worker_group.master_port}"
        if self._survives is not None:
            os.environ[DEATH_STORE] = address  # the ranks inherit it
        ids = super()._start_workers(worker_group)
        if self._survives is not None:
            os.environ.pop(DEATH_STORE)
            here = [worker.global_rank for worker in worker_group.workers]
            self._deaths = Deaths(self._survives, here, connect(address, _STORE_TIMEOUT), self._read_records)
        context: Any = self._pcontext
        # Elastic's own close gives every rank 30 s and signals whole process groups: a data loader's processes
        # would die of the signal before their rank has finished its step.
        elastic_close = context.close

        def close(death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
            if death_sig is None:  # a rank has failed by itself: others may be about to, and to say why
                self._await_ends(RECORD_SECONDS)
            self.end_all(death_sig or signal.SIGTERM)
            elastic_close(death_sig, 1)  # no process is left to signal; it frees its resources

        context.close = close
        if self._nodes is not None:
            self._nodes.watch()
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ranks = [worker.global_rank for worker in worker_group.workers]
        if self._deaths is not None:
            return self._monitor_survivors(ranks, self._deaths)
        self._report_lingering(ranks)
        return super()._monitor_workers(worker_group)

    def _monitor_survivors(self, ranks: Sequence[int], deaths: Deaths) -> RunResult:
        """Elastic's, where it is no reason to end all ranks that some have ended by themselves."""
        exits, running = self.outcome.exits, self._running()
        self._note_exits(running)
        to_end = self._look(deaths, exits)
        if to_end is None:
            return RunResult(WorkerState.FAILED)
        for rank in to_end:
            kill(running[rank])
            exits[rank] = RankExit(running[rank].returncode, after_stop=True)
        self._report_lingering([rank for rank in ranks if rank not in deaths.lost])
        if len(exits) < len(ranks) or deaths.is_suspicious:
            return RunResult(WorkerState.HEALTHY)
        return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))

    def _look(self, deaths: Deaths, exits: Mapping[int, RankExit]) -> list[int] | None:
        """Ranks of replicas that are lost, which are to be ended; None: the run cannot go on."""
        try:
            to_end = deaths.look(exits, self._nodes.gone_ranks() if self._nodes is not None else ())
        except RuntimeError:  # the store has gone, with the node that holds it
            deaths.verdict = "the node that holds the run's store has gone"
        if deaths.verdict is not None:
            return None
        if self._nodes is not None:
            self._nodes.forgive(deaths.lost)
        return to_end

    def _read_records(self) -> list[failure.FailureRecord]:
        return failure.read_all(self.outcome.folder) if self.outcome.folder is not None else []

    def _report_lingering(self, ranks: list[int]) -> None:
        """Say once which ranks do not come to their end after others have: no collective is left to time out."""
        if self.marks is None or self._has_reported_lingering:
            return
        left = [rank for rank in ranks if not finished.is_marked(self.marks, rank)]
        if not left or len(left) == len(ranks):
            return
        now = time.monotonic()
        self._first_finished = self._first_finished or now
        if now - self._first_finished >= LINGER_SECONDS:
            self._has_reported_lingering = True
            noun = f"rank {left[0]} is" if len(left) == 1 else f"ranks {', '.join(map(str, left))} are"
            print(
                f"colossus: training is over, but {noun} still at work {LINGER_SECONDS:g} s after others have ended "
                f"(a hook's on_train_end?); Ctrl-C ends the run",
                file=sys.stderr,
                flush=True,
            )

    def _agree_on_folder(self, worker_group: WorkerGroup) -> tuple[Path, str | None]:
        """The run folder, and what the ranks resume from."""
        store = worker_group.store
        if worker_group.group_world_size == 1 or store is None:
            taken = self._taken = self._begin()
            return taken.folder, taken.resume
        ranks = [worker.global_rank for worker in worker_group.workers]
        guess = own_address(self._endpoint or "")
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
            taken = self._taken = self._begin()
        except ConfigError as error:
            return "", None, error.problems
        return str(taken.folder.resolve()), taken.resume, []

    def _await_ends(self, seconds: float) -> None:
        """Wait until all ranks have ended by themselves, at most this long."""
        context: Any = self._pcontext
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(handler.proc.poll() is not None for handler in context.subprocess_handlers.values()):
                return
            time.sleep(0.02)

    def _running(self) -> dict[int, Any]:
        """The processes of this node's ranks, by rank, of which it is not known that they have ended."""
        context: Any = self._pcontext
        if context is None:
            return {}
        workers = {worker.global_rank: worker.local_rank for worker in self._worker_group.workers}
        return {
            rank: context.subprocess_handlers[local].proc
            for rank, local in workers.items()
            if local in context.subprocess_handlers and rank not in self.outcome.exits
        }

    def _note_exits(self, processes: dict[int, Any]) -> None:
        """Take those out that have ended by themselves, and record how."""
        for rank, process in list(processes.items()):
            code = process.poll()
            if code is not None:
                is_finished = self.marks is None or finished.is_marked(self.marks, rank)
                self.outcome.exits[rank] = RankExit(code, is_finished=is_finished)
                del processes[rank]

    def end_all(self, signum: int = signal.SIGTERM) -> None:
        """End the ranks that still run (`end_processes`), and record how each ended."""
        processes = self._running()
        self._note_exits(processes)
        if not processes:
            return
        before, deaths = dict(self.outcome.exits), self._deaths
        has_failed = self._nodes is not None and self._nodes.has_failure()
        if deaths is not None:
            deaths.is_stopping = True

        def look(exits: Mapping[int, RankExit]) -> Collection[int] | None:
            ended = {**before, **exits}
            return none_if_unfinished(ended) if deaths is None else self._look(deaths, ended)

        def when_hurried() -> None:
            self.outcome.is_hurried = True

        self.outcome.exits |= end_processes(
            processes, signum, self.marks, has_failed=has_failed, when_hurried=when_hurried, look=look
        )


def _silence_elastic() -> None:
    # torch's loggers set their own levels, so only cutting them off above works
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
