"""Faults at moments of a run: what is injected, what is expected of the launcher, and what was seen.

A row of the table is a fault (`FAULTS`), a moment (`MOMENTS`) and a plan (`PLANS`). Seconds count from the fault to the
end of the last launcher.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from helpers.launching import LAUNCH, finish, start, wait_for
from helpers.ports import free_port

from colossus.launch.memory_folder import HOST_MEMORY

CONFIG = Path(__file__).parent / "launched" / "faulty.py"
CULPRIT = 1

PLANS = {
    "data 2": ["parallel.data=2"],
    "pipeline 2": ["parallel.pipeline=2"],
    "tensor 2": ["parallel.tensor=2"],
    "2 nodes": ["parallel.data=2"],
}
MOMENTS = ["constructor", "forward", "backward", "between steps", "evaluation", "data", "close"]
ERRORS = ["exception", "memory", "sysexit", "exit0", "exit1", "kill"]
HANGS = ["hang", "stop"]
STOPS = ["term", "int", "term-launcher", "int-launcher", "term-group", "int-group"]
FAULTS = [*ERRORS, *HANGS, *STOPS, "kill-launcher", "disk"]

#: of a collective, where the fault is a hang
TIMEOUT_SECONDS = 6.0
#: that a fault may take until all is over: a stop has a grace of 4 s, a hang is noticed after a time-out before that
MOST_SECONDS = {"error": 8.0, "hang": 14.0 + TIMEOUT_SECONDS, "stop": 8.0, "kill-launcher": 16.0}


@dataclass(frozen=True)
class Case:
    fault: str
    moment: str
    plan: str

    @property
    def kind(self) -> str:
        if self.fault in ERRORS:
            return "error"
        if self.fault in HANGS:
            return "hang"
        return "stop" if self.fault in STOPS else self.fault

    def __str__(self) -> str:
        return f"{self.fault} at {self.moment} under {self.plan}"


@dataclass
class Outcome:
    """How a run with a fault ended.

    Attributes:
        seconds: from the fault to the end, None when it never came to the fault.
        codes: exit codes of the launchers.
        text: what they printed.
        left: what is still there: processes, memory, sockets, temporary files.
    """

    seconds: float | None
    codes: list[int]
    text: str
    left: list[str] = field(default_factory=list)

    @property
    def named(self) -> bool:
        return f"run failed: rank {CULPRIT}" in self.text


def cases() -> Iterator[Case]:
    for plan in PLANS:
        for moment in MOMENTS:
            for fault in FAULTS:
                if moment == "close" and fault in HANGS:
                    continue  # waited for as long as it takes, see `test_a_rank_that_does_not_come_to_its_end_is_named`
                if fault == "disk" and (moment != "between steps" or plan == "2 nodes"):
                    continue
                yield Case(fault, moment, plan)


def run(case: Case, folder: Path) -> Outcome:
    """Run it in an empty folder, which should be empty of processes, and its ``tmp`` of files, afterwards."""
    (folder / "tmp").mkdir(parents=True)
    culprit = 0 if case.fault == "disk" else CULPRIT  # that writes the metrics
    variables = {
        "FAULT": case.fault,
        "MOMENT": case.moment,
        "CULPRIT": str(culprit),
        "FAULT_FOLDER": str(folder),
        "TMPDIR": str(folder / "tmp"),
    }
    command = [*LAUNCH[:-1], str(CONFIG), "--run-dir", str(folder / "run"), *PLANS[case.plan]]
    if case.kind == "hang":
        command.append(f"comm.timeout_seconds={TIMEOUT_SECONDS}")
    launchers = []
    if case.plan == "2 nodes":
        command += ["--nnodes", "2", "--nproc", "1", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    for _ in range(2 if case.plan == "2 nodes" else 1):
        launchers.append(start(command, folder, new_session=True, **variables))
    ended = [finish(launcher) for launcher in launchers]
    over = time.time()
    injected = folder / "injected"
    if case.fault == "kill-launcher":
        pids = [int(path.read_text()) for path in folder.glob("pid-*")]
        wait_for(lambda: not [pid for pid in pids if _runs_in(pid, folder)], *pids)
        over = time.time()
    seconds = over - float(injected.read_text()) if injected.exists() else None
    codes = [code for code, _, _ in ended]
    return Outcome(seconds, codes, "".join(out + err for _, out, err in ended), leftovers(folder))


def problems(case: Case, outcome: Outcome, *, timed: bool = True) -> list[str]:
    """What is not as expected, in words; on a busy machine the seconds say nothing."""
    lines = [f"left behind: {name}" for name in outcome.left]
    if outcome.seconds is None:
        return [*lines, "never came to the fault"]
    most = MOST_SECONDS.get(case.kind)
    if timed and most is not None and outcome.seconds > most:
        lines.append(f"took {outcome.seconds:.1f} s, more than {most:g}")
    codes = expected_codes(case)
    if not all(code in codes for code in outcome.codes):
        lines.append(f"exit codes {outcome.codes}, not of {sorted(codes)}")
    if case.kind in ("error", "hang") and not outcome.named:
        lines.append(f"rank {CULPRIT} is not named")
    if "Traceback" in outcome.text and case.kind in ("stop", "kill-launcher", "disk"):
        lines.append("a traceback")
    if case.fault == "disk" and "done: 12 steps" not in outcome.text:
        lines.append("did not train on")
    return lines


def expected_codes(case: Case) -> set[int]:
    if case.kind in ("error", "hang"):
        return {1}
    if case.kind == "disk":
        return {0}
    if case.kind == "kill-launcher":
        return {-signal.SIGKILL, 1}
    code = 128 + (signal.SIGTERM if case.fault.startswith("term") else signal.SIGINT)
    # a rank that is through may take a signal for nothing; a launcher has said that it was stopped
    return {0, code} if case.moment == "close" and "-" not in case.fault else {code}


def leftovers(folder: Path) -> list[str]:
    """Processes that run in the folder, files in its ``tmp``, memory and sockets with the names of its ranks, and
    folders for checkpoints in memory whose launcher ran here and has gone."""
    pids = {path.read_text() for path in folder.glob("pid-*")}
    names = [f"process {pid}" for pid in processes_of(folder)]
    names += [f"temporary {path.name}" for path in (folder / "tmp").iterdir()]
    names += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if pids & set(name.replace("-", "_").split("_"))]
    names += [str(path) for path in HOST_MEMORY.glob("colossus-memory-*") if _is_left(path, folder)]
    sockets = Path("/proc/net/unix").read_text().split()
    names += [f"socket {name}" for name in sockets if name.startswith("@colossus-") and pids & set(name.split("-"))]
    return names


def _is_left(memory: Path, folder: Path) -> bool:
    """Whether a launcher that ran in the folder has made it, and has not removed it."""
    try:
        with (memory / "launcher.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock.read().rstrip().endswith(f" in {folder}")
    except (BlockingIOError, FileNotFoundError):  # its launcher runs, or is about to remove it
        return False


def processes_of(folder: Path) -> list[int]:
    """Those that run in the folder."""
    return [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and _runs_in(int(pid), folder)]


def _runs_in(pid: int, folder: Path) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return stat[0] != "Z" and Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(folder)
    except OSError:
        return False


def native(error: BaseException) -> BaseException:
    """An error as torch raises it: out of native code, which has no frame."""
    try:
        (number for number in ()).throw(error)
    except BaseException as caught:
        return caught


@contextmanager
def nothing_runs_on(folder: Path) -> Iterator[None]:
    """Whatever happens inside, no process is left that runs in the folder."""
    try:
        yield
    finally:
        for pid in processes_of(folder):
            os.kill(pid, signal.SIGKILL)
