"""Faults at moments of runs that are restarted: each ends as the run that was never disturbed.

A row of the table is what happens (`FAULTS`) under a plan (`PLANS`).
"""

from __future__ import annotations

import hashlib
import math
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.faults import leftovers, nothing_runs_on, processes_of
from helpers.launching import LAUNCH, finish, rows_of, start, wait_for
from helpers.ports import free_port

from colossus.launch import attempt_log, run_folder

CONFIG = Path(__file__).parent / "launched" / "restarted.py"
#: of a row, what depends on the run and not on the machine
NUMBERS = ("step", "loss", "grad_norm", "lr", "tokens")

PLANS: dict[str, Sequence[str]] = {
    "data 2": (),
    "tensor 2": ("parallel.data=1", "parallel.tensor=2"),
    "pipeline 2": ("parallel.data=1", "parallel.pipeline=2"),
    "zero 3": ("parallel.zero=3",),
    "sgp": ("parallel.strategy=dict(type='sgp',graph='complete')",),
    "local_sgd": ("parallel.strategy=dict(type='local_sgd',period=2)",),
    "server": ("parallel.strategy=dict(type='server',servers=1)",),
    "async": ("parallel.strategy=dict(type='server',servers=1,mode='async')",),
    "2 nodes": (),
}
#: plans under which no two runs are the same: each step comes once, and its numbers are finite
INEXACT = ("async",)
IN_MEMORY = ("checkpoint.memory_every=1",)
_MEMORY_ALONE = (*IN_MEMORY, "checkpoint.every=100")


@dataclass(frozen=True)
class Fault:
    """What happens to a run of 8 steps that is saved every 3, and what is expected of its restarts.

    Attributes:
        troubles: as the config reads them. After those of the launcher the run is resumed by hand.
        keys: overrides.
        variables: of the environment.
        cause: what the first row of restarts says, a part of it; an error that all ranks raise is of any.
        begins: the steps behind which the attempts after the first go on.
        undisturbed: variables of the run that it is compared with.
    """

    troubles: str
    begins: Sequence[int]
    keys: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    undisturbed: Mapping[str, str] = field(default_factory=dict)
    cause: str = ""


_WAITS = {"WAIT_FOR_MEMORY": "1"}
FAULTS: dict[str, Fault] = {
    "kill": Fault("kill@6", [3], cause="rank 1 near step 6 was killed by SIGKILL"),
    "raise": Fault("raise@6", [3], cause="rank 1 at step 6 raised ValueError: one step too many"),
    "exit": Fault("exit@6", [3], cause="rank 1 near step 6 ended with exit code 3"),
    "hang": Fault(
        "hang@6",
        [3],
        ["comm.timeout_seconds=4.0", "checkpoint.grace_seconds=1.5"],
        cause="rank 1 at step 6 did not reach the end of its step",
    ),
    "stopped, from memory": Fault(
        "stop@6",
        [5],
        [*_MEMORY_ALONE, "comm.timeout_seconds=4.0", "checkpoint.grace_seconds=1.5"],
        {"WAIT_FOR_MEMORY": "1"},
        cause="rank 1",
    ),
    "twice in a row": Fault("kill@6 kill@6", [3, 3]),
    "in the first step": Fault("kill@1", [0]),
    "during a save": Fault("kill@save", [0]),
    "while a restart builds the model": Fault("kill@6 kill@constructor", [3, 3]),
    "while a restart begins": Fault("kill@6 kill@begin", [3, 3]),
    "launcher stopped during a restart": Fault("kill@6 term@constructor", [3]),
    "launcher killed": Fault("orphan@6", [], IN_MEMORY, _WAITS | {"STEP_SECONDS": "0.1"}),
    "kill, from memory": Fault("kill@6", [5], _MEMORY_ALONE, _WAITS),
    "kill, from memory, twice": Fault("kill@5 kill@7", [4, 6], _MEMORY_ALONE, _WAITS),
    "during a save in memory": Fault("kill@save", [0], _MEMORY_ALONE),
    "memory newer than the disk": Fault("kill@6", [5], IN_MEMORY, _WAITS),
    "a bit flipped in memory": Fault("kill@6", [4], IN_MEMORY, _WAITS | {"DAMAGE": "flip"}),
    "a file of memory removed": Fault("kill@6", [4], IN_MEMORY, _WAITS | {"DAMAGE": "remove"}),
    "all in memory damaged": Fault("kill@6", [3], IN_MEMORY, _WAITS | {"DAMAGE": "all"}),
    "disk full, memory not": Fault("kill@6", [5], IN_MEMORY, _WAITS | {"DISK": "full"}),
    "a copy changed": Fault(
        "flip@5",
        [4],
        ["checkpoint.every=1", "train.check_replicas_every=2", "train.on_mismatch='restart'"],
        cause="at step 6 raised ReplicasDiffer: after step 6 copies of parameters differ",
    ),
    "a loss spike": Fault(
        "",
        [3],
        ["train.on_spike=dict(factor=20.0,window=2)"],
        {"POISON": "100", "POISONED": "3"},
        {"POISON": "100", "POISONED": "3", "LEFT_OUT": "4:3"},
        "at step 6 raised LossSpike: the loss of step 6 is",
    ),
}
#: faults of some plans: not under all can copies differ, or a batch be left out
_FOR_SOME: dict[str, Sequence[str]] = {
    "launcher killed": [plan for plan in PLANS if plan != "2 nodes"],  # the other node would wait for this one
    "a copy changed": ("data 2", "tensor 2"),
    "a loss spike": ("data 2", "tensor 2", "pipeline 2", "zero 3", "2 nodes"),
}


#: exit codes of a launcher after troubles of its own; then the run is resumed by hand
_ENDS = {"term": 128 + signal.SIGTERM, "orphan": -signal.SIGKILL}


@dataclass(frozen=True)
class Case:
    fault: str
    plan: str

    def __str__(self) -> str:
        return f"{self.fault} under {self.plan}"


def cases() -> Iterator[Case]:
    for plan in PLANS:
        for fault in FAULTS:
            if plan in _FOR_SOME.get(fault, PLANS):
                yield Case(fault, plan)


def launch(plan: str, folder: Path, *words: str, **variables: str) -> list[tuple[int, str, str]]:
    """Run a plan in a folder; exit code, standard output and standard error of each launcher."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    command = [*LAUNCH[:-1], str(CONFIG), "--run-dir", str(folder / "run"), *PLANS[plan], *words]
    if plan == "2 nodes":
        command += ["--nnodes", "2", "--nproc", "1", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    with nothing_runs_on(folder):
        started = [
            start(command, folder, TMPDIR=str(folder / "tmp"), **variables)
            for _ in range(2 if plan == "2 nodes" else 1)
        ]
        ended = [finish(launcher) for launcher in started]
        if any(code < 0 for code, _, _ in ended):  # ranks without a launcher end by themselves
            wait_for(lambda: not processes_of(folder), *processes_of(folder))
        return ended


def run(case: Case, folder: Path, undisturbed: Path) -> list[str]:
    """What is not as expected of a run with a fault, in words.

    Args:
        folder: new, for the run.
        undisturbed: of the run without the fault, as `run_undisturbed` leaves it.
    """
    fault = FAULTS[case.fault]
    ended = launch(case.plan, folder, "--max-restarts", "3", *fault.keys, TROUBLES=fault.troubles, **fault.variables)
    text = "".join(out + err for _, out, err in ended)
    problems = [f"left behind: {name}" for name in leftovers(folder)]
    last_trouble = fault.troubles.rpartition(" ")[2].partition("@")[0]
    if last_trouble in _ENDS:
        if any(code != _ENDS[last_trouble] for code, _, _ in ended):
            return [*problems, f"exit codes {[code for code, _, _ in ended]}, not {_ENDS[last_trouble]}", text]
        ended = launch(case.plan, folder, "--max-restarts", "3", "--resume", *fault.keys)
        text += "".join(out + err for _, out, err in ended)
        problems += [f"left behind: {name}" for name in leftovers(folder)]
    if any(code for code, _, _ in ended):
        return [*problems, f"exit codes {[code for code, _, _ in ended]}", text]
    rows = restarts_of(folder)
    # an attempt that ends before its first step may leave it open from where it would have gone on
    begins = [row.get("from_step", wanted) for row, wanted in zip(rows, fault.begins, strict=False)]
    if begins != [*fault.begins]:
        problems.append(f"went on behind steps {[row.get('from_step') for row in rows]}, not {fault.begins}")
    # a server may be the first that tells that a worker has gone
    in_words = _without_step if case.plan in ("sgp", "local_sgd") else str
    if rows and case.plan not in ("server", "async") and in_words(fault.cause) not in in_words(rows[0]["cause"]):
        problems.append(f"the cause is said to be {rows[0]['cause']!r}, not {fault.cause!r}")
    if [row["restart"] for row in rows] != [*range(1, len(rows) + 1)]:
        problems.append(f"restarts {[row['restart'] for row in rows]}")
    if case.plan in INEXACT:
        if [step for step, *_ in numbers(folder)] != [step for step, *_ in numbers(undisturbed)]:
            problems.append(f"steps are {[step for step, *_ in numbers(folder)]}")
        if not all(math.isfinite(number) for row in numbers(folder) for number in row if number is not None):
            problems.append(f"metrics are not finite: {numbers(folder)}")
    else:
        if numbers(folder) != numbers(undisturbed):
            problems.append(f"metrics are {numbers(folder)}, not {numbers(undisturbed)}")
        if saved(folder) != saved(undisturbed):
            problems.append("the last checkpoint differs from that of the undisturbed run")
    run_folder.take(folder / "run", None).close()
    return [*problems, text] if problems else []


def _without_step(cause: str) -> str:
    """Near which step a rank has died the first rank's rows say, which may be behind where replicas do not wait."""
    return re.sub(r"near step \d+", "near a step", cause)


def run_undisturbed(case: Case, root: Path) -> Path:
    """The folder of the run without the fault; one for all faults of a plan with the same keys."""
    fault = FAULTS[case.fault]
    plan = "data 2" if case.plan == "2 nodes" else case.plan  # the same run
    what = (plan, *fault.keys, *map("=".join, fault.undisturbed.items()))
    folder = root / hashlib.sha256(repr(what).encode()).hexdigest()[:16]
    if not folder.exists():
        ended = launch(plan, folder, "--max-restarts", "3", *fault.keys, **fault.undisturbed)
        assert [code for code, _, _ in ended] == [0] * len(ended), ended
        assert len(saved(folder)) > 0
        assert not restarts_of(folder)
    return folder


def numbers(folder: Path) -> list[list[Any]]:
    return [[row[key] for key in NUMBERS] for row in rows_of(folder / "run")]


def saved(folder: Path) -> list[bytes]:
    """Parameters and the optimizer's state after the last step."""
    last = folder / "run" / "checkpoints" / "step-00000008"
    return [path.read_bytes() for path in sorted(last.glob("rank-*.safetensors"))]


def restarts_of(folder: Path) -> list[dict[str, Any]]:
    """A row of each restart that trains or has ended: its number, the cause, and the cost where its ranks trained."""
    return [
        {**attempt, "restart": number, "cause": attempts[number - 1]["cause"]}
        for attempts in attempt_log.read_launches(folder / "run")
        for number, attempt in attempts.items()
        if number and {"from_step", "ended"} & attempt.keys()
    ]
