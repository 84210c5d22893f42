"""Ranks as child processes with a process group: for ``colossus doctor``, for tests and for benchmarks.

They are forked by default: a forked rank starts in 0.1 s, where a new Python would import torch for seconds, and
functions and arguments need no pickling. The parent must never have run a multi-threaded operation before (a child
hangs in its first one), so it is set to one thread while it forks; CUDA and macOS do not allow fork at all.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from colossus.machine import keep_freed_memory


class RanksFailed(RuntimeError):
    """An error of some ranks; the message names the first of them with its traceback.

    Attributes:
        tracebacks: tracebacks of ranks that raised.
        exit_codes: exit codes of ranks that ended without an answer; the negative number of a signal that killed them.
        silent: ranks that were killed because nothing moved any more.
        victims: those of `tracebacks` that failed because another rank had gone (`LocalRanks`).
    """

    def __init__(
        self,
        tracebacks: dict[int, str],
        exit_codes: dict[int, int],
        silent: list[int],
        victims: Collection[int] = (),
    ) -> None:
        self.tracebacks, self.exit_codes, self.silent, self.victims = tracebacks, exit_codes, silent, victims
        if tracebacks:
            first = min(tracebacks, key=lambda rank: (rank in victims, rank))
            message = f"rank {first} failed\n{tracebacks[first]}"
        elif exit_codes:
            message = f"ranks ended without an answer, with exit codes {exit_codes}"
        else:
            message = f"ranks {silent} did not answer"
        super().__init__(message)


class LocalRanks:
    """A set of ``world`` processes with a process group of their own (none for one rank), each with one object.

    They stay alive between calls: while one group works, the others wait in a read, keep their memory and use no
    processor time.

    Args:
        make: rank -> the object, built in the child after the process group.
        patience: seconds without progress, see `StallDetector`, after which the ranks that have not answered are
            killed.
        start: ``fork`` or ``spawn``; spawned ranks need picklable arguments.
        backend: backend of the process group.
        collective_timeout: seconds; by default torch's own.
        variables: environment variables of the ranks, where their names are not set.
        once: the ranks answer with the result of ``make`` (``made``), and end.
        is_victim: returns whether an error of a rank comes from another rank that has gone.

    Raises:
        RanksFailed: from here and from ``call``; the ranks are gone then.
    """

    def __init__(
        self,
        world: int,
        make: Callable[[int], Any],
        *,
        patience: float = 300.0,
        start: str = "fork",
        backend: str = "gloo",
        collective_timeout: float | None = None,
        variables: Mapping[str, str] | None = None,
        once: bool = False,
        is_victim: Callable[[BaseException], bool] = lambda error: False,
    ) -> None:
        self.world, self.patience = world, patience
        self._folder = tempfile.TemporaryDirectory(prefix="colossus-ranks-")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        context: Any = multiprocessing.get_context(start)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            store = os.path.join(self._folder.name, "store")
            for rank in range(world):
                here, there = context.Pipe()
                settings = (store, backend, collective_timeout, variables or {}, make, once, is_victim)
                self._processes.append(context.Process(target=_run_rank, args=(there, rank, world, *settings)))
                with _interrupts_held():
                    self._processes[-1].start()
                there.close()
                self._pipes.append(here)
            self.made = self._collect()
        except BaseException:
            self.close()
            raise
        finally:
            if threads != 1:
                torch.set_num_threads(threads)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call ``getattr(object, method)(*args)`` on every rank at once and return the results by rank."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((method, args)))
        return self._collect()

    def _collect(self) -> list[Any]:
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        results: dict[int, Any] = {}
        tracebacks: dict[int, str] = {}
        exit_codes: dict[int, int] = {}
        victims: set[int] = set()
        stall = StallDetector([process.pid for process in self._processes], self.patience)
        while waiting and not stall.is_stalled():
            for pipe in wait(list(waiting), timeout=0.5):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                stall.record_progress()
                try:
                    done, value, is_victim = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    self._processes[rank].join()
                    exit_codes[rank] = self._processes[rank].exitcode
                    continue
                (results if done else tracebacks)[rank] = value
                if is_victim:
                    victims.add(rank)
        if waiting or tracebacks or exit_codes:
            self.close()
            raise RanksFailed(tracebacks, exit_codes, sorted(waiting.values()), victims)
        return [results[rank] for rank in sorted(results)]

    def close(self) -> None:
        started = [process for process in self._processes if process.pid is not None]  # Ctrl-C may come before the last
        for process in started:
            process.kill()
        for process in started:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []
        self._folder.cleanup()

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_local_ranks(world: int, body: Callable[[int], Any], **options: Any) -> list[Any]:
    """Run ``body(rank)`` once on each of ``world`` ranks and return the results by rank.

    ``options`` are those of `LocalRanks`. A rank ends when its body has, even if other ranks still wait for it.
    """
    with LocalRanks(world, body, once=True, **options) as ranks:
        return ranks.made


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold back Ctrl-C until the end of the block: Python drops what is raised in the hooks of a fork."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_rank(
    pipe: Connection,
    rank: int,
    world: int,
    store: str,
    backend: str,
    collective_timeout: float | None,
    variables: Mapping[str, str],
    make: Callable[[int], Any],
    once: bool,
    is_victim: Callable[[BaseException], bool],
) -> None:
    code = 0
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        torch.set_num_threads(1)
        keep_freed_memory()
        os.environ.update({**variables, **os.environ})
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        if world > 1:
            if backend == "nccl":
                torch.cuda.set_device(rank % torch.cuda.device_count())  # else the barrier guesses the device
            timeout = timedelta(seconds=collective_timeout) if collective_timeout is not None else None
            dist.init_process_group(
                backend, rank=rank, world_size=world, store=dist.FileStore(store, world), timeout=timeout
            )
            dist.barrier()  # a rank that leaves while others still connect would break them
        target = make(rank)
        pipe.send_bytes(pickle.dumps((True, target if once else None, False)))
        while not once:
            try:
                method, args = pickle.loads(pipe.recv_bytes())
            except EOFError:  # the parent has gone
                break
            pipe.send_bytes(pickle.dumps((True, getattr(target, method)(*args), False)))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr, flush=True)
    except BaseException as error:
        code = 1
        try:
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc(), is_victim(error))))
        except BaseException:  # without this, the exit below would hide both errors
            sys.__excepthook__(*sys.exc_info())
    finally:
        os._exit(code)  # destructors of broken process groups can hang


class StallDetector:
    """A detector that tells a hang from a slow or busy machine: nothing has moved for ``patience`` seconds.

    Progress is an answer or a line of output (the caller records those), or processor time of the processes and of
    their children: more than 2 % of one core, since processes that wait for each other wake up now and then. A sum that
    has become smaller is progress, too: a process has ended.
    """

    def __init__(self, pids: Sequence[int], patience: float) -> None:
        self._pids, self._patience = list(pids), patience
        self.record_progress()

    def record_progress(self) -> None:
        self._since, self._used = time.monotonic(), processor_seconds(self._pids)

    def is_stalled(self) -> bool:
        silent = time.monotonic() - self._since
        if silent < self._patience / 4:
            return False
        if abs(processor_seconds(self._pids) - self._used) > 0.02 * self._patience:
            self.record_progress()
            return False
        return silent > self._patience


def processor_seconds(pids: Iterable[int]) -> float:
    """Return the processor time so far of these processes and all their children, by /proc, or by ps (macOS)."""
    if not Path("/proc/self/stat").exists():
        return _seconds_by_ps(pids)
    seconds = 0.0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            # user and system time of the process and of its ended children
            seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            seconds += processor_seconds(map(int, children))
    return seconds


def _seconds_by_ps(pids: Iterable[int]) -> float:
    """Return `processor_seconds` without the children that have ended; 0 where there is no ps."""
    command = ["ps", "-A", "-o", "pid=", "-o", "ppid=", "-o", "time="]
    try:
        rows = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return 0.0
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for child, parent, text in map(str.split, rows):
        children.setdefault(int(parent), []).append(int(child))
        days, _, clock = text.rpartition("-")  # [days-][hours:]minutes:seconds
        parts = [float(part) for part in reversed(clock.replace(",", ".").split(":"))]
        seconds[int(child)] = int(days or 0) * 86400 + sum(part * 60**power for power, part in enumerate(parts))
    total, waiting = 0.0, list(pids)
    while waiting:
        pid = waiting.pop()
        total += seconds.get(pid, 0.0)
        waiting += children.get(pid, [])
    return total
