"""One agent per node, on torch.distributed.elastic: starts this node's workers and waits for their end.

Elastic does the rendezvous, the environment of each rank and the monitoring. Ours are: which ranks exited by themselves
before the others got the stop signal, a short time from that signal to SIGKILL, and silence, since ``causes`` prints
one block in place of elastic's log and traceback.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from colossus.launch import finished, run_folder
from colossus.launch.causes import RankExit
from colossus.launch.stop import GRACE_SECONDS, STOP_SIGNALS

KILL_SECONDS = GRACE_SECONDS + 0.5
"""From the stop signal to SIGKILL: workers end themselves before, unless they cannot run at all."""

RECORD_SECONDS = 0.5
"""From the first failed rank to the stop signal: the culprit is often still writing its record when a victim ends."""

LINGER_SECONDS = 60.0
"""How long ranks may run on after the first one is through, before the user hears of it."""


@dataclass
class Outcome:
    """How this node's ranks ended.

    Attributes:
        exits: global rank -> how its process ended.
        signum: the signal the launcher itself received, None when the ranks ended otherwise.
        folder: the run folder all nodes agreed on.
    """

    folder: Path
    exits: dict[int, RankExit] = field(default_factory=dict)
    signum: int | None = None


def run_workers(
    config_path: str,
    overrides: list[str],
    *,
    local_ranks: int,
    folder: Path,
    nodes: int = 1,
    endpoint: str | None = None,
) -> Outcome:
    """Start ``local_ranks`` workers on this node and wait until all have ended.

    Args:
        folder: the run folder proposed by this node; the first node's wins.
        endpoint: ``host:port`` where the nodes meet; needed when there are several.

    Raises:
        RuntimeError: when the nodes do not meet (elastic's RendezvousError).
    """
    _silence_elastic()
    parameters = RendezvousParameters(
        backend="c10d",
        # port 0: the kernel picks a free one
        endpoint=endpoint or "127.0.0.1:0",
        run_id="colossus",
        min_nodes=nodes,
        max_nodes=nodes,
        local_addr="127.0.0.1" if nodes == 1 else None,
    )
    handler = get_rendezvous_handler(parameters)
    spec = WorkerSpec(
        role="colossus",
        local_world_size=local_ranks,
        entrypoint=sys.executable,
        args=(),
        rdzv_handler=handler,
        max_restarts=0,
        monitor_interval=0.1,
    )
    agent = _Agent(spec, config_path, overrides, folder)
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
            handler.shutdown()
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
    def __init__(self, spec: WorkerSpec, config_path: str, overrides: list[str], folder: Path) -> None:
        super().__init__(spec, _Terminal(), exit_barrier_timeout=60)
        self._config_path, self._overrides = config_path, overrides
        self.outcome = Outcome(folder)
        self.marks: Path | None = None
        self._first_finished: float | None = None
        self._has_reported_lingering = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.outcome.folder = self._agree_on_folder(worker_group)
        # elastic wants to expand "${local_rank}" in arguments; a "$" of the user's stays as it is
        arguments = ["--run-dir", str(self.outcome.folder), self._config_path, *self._overrides]
        worker_group.spec.args = ("-m", "colossus.launch.worker", *(text.replace("$", "$$") for text in arguments))
        ids = super()._start_workers(worker_group)
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
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._report_lingering([worker.global_rank for worker in worker_group.workers])
        return super()._monitor_workers(worker_group)

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

    def _agree_on_folder(self, worker_group: WorkerGroup) -> Path:
        store = worker_group.store
        if worker_group.group_world_size == 1 or store is None:
            return self.outcome.folder
        if worker_group.group_rank == 0:
            self._lock = run_folder.prepare(self.outcome.folder)
            store.set("colossus/run_dir", str(self.outcome.folder.resolve()))
        return Path(store.get("colossus/run_dir").decode())

    def _await_ends(self, seconds: float) -> None:
        """Wait until all ranks have ended by themselves, at most this long."""
        context: Any = self._pcontext
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(handler.proc.poll() is not None for handler in context.subprocess_handlers.values()):
                return
            time.sleep(0.02)

    def end_all(self, signum: int = signal.SIGTERM) -> None:
        """End the ranks that still run: the signal, then SIGKILL after ``KILL_SECONDS``. Record how each ended."""
        context: Any = self._pcontext
        if context is None:
            return
        workers = {worker.global_rank: worker.local_rank for worker in self._worker_group.workers}
        processes = {
            rank: context.subprocess_handlers[local].proc
            for rank, local in workers.items()
            if local in context.subprocess_handlers and rank not in self.outcome.exits
        }
        for rank, process in list(processes.items()):
            code = process.poll()
            if code is not None:
                is_finished = self.marks is None or finished.is_marked(self.marks, rank)
                self.outcome.exits[rank] = RankExit(code, is_finished=is_finished)
                del processes[rank]
        if not processes:
            return
        # a second Ctrl-C must not interrupt the wait, which is over in seconds
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        for process in processes.values():
            process.send_signal(signum)
        deadline = time.monotonic() + KILL_SECONDS
        for rank, process in processes.items():
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            self.outcome.exits[rank] = RankExit(process.returncode, after_stop=True)


def _silence_elastic() -> None:
    # torch's loggers set their own levels, so only cutting them off above works
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
