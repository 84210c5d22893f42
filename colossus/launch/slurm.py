"""The variables that srun sets, translated into those that torch reads. No torch, no ``scontrol``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from colossus.config import ConfigError

#: in the run folder: which jobs have used it
RECORD = "slurm.json"

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def expand_nodelist(text: str) -> list[str]:
    """Host names of a SLURM node list: ``node[01-03,07],gpu5`` is node01, node02, node03, node07, gpu5.

    Several brackets in one name and text after a bracket are allowed (``rack[1-2]n[0-1]-ib``).

    Raises:
        ValueError: when a bracket is not closed or holds something that is not a number or a range.
    """
    return [host for entry in _split(text) for host in _expand(entry, text)]


def _split(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    entries, depth = [""], 0
    for letter in text.strip():
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            entries.append("")
        else:
            entries[-1] += letter
        if depth not in (0, 1):
            raise ValueError(f"cannot read the SLURM node list {text!r}: brackets do not match")
    if depth:
        raise ValueError(f"cannot read the SLURM node list {text!r}: a bracket is not closed")
    return [entry for entry in entries if entry]


def _expand(entry: str, whole: str) -> list[str]:
    head, bracket, rest = entry.partition("[")
    if not bracket:
        return [entry]
    inside, _, tail = rest.partition("]")
    hosts = []
    for item in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item.strip())
        if match is None:
            raise ValueError(f"cannot read the SLURM node list {whole!r}: {item!r} is not a number or a range")
        first, last = match[1], match[2] or match[1]
        for number in range(int(first), int(last) + 1):
            hosts.append(f"{head}{number:0{len(first)}d}")
    return [host + end for host in hosts for end in _expand(tail, whole)] if tail else hosts


def tasks_per_node(text: str) -> list[int]:
    """``2(x3),1`` is [2, 2, 2, 1]."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise ValueError(f"cannot read SLURM's tasks per node {text!r}: {item!r} is not like 2 or 2(x3)")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def master_port(job_id: int, step_id: int = 0) -> int:
    """A port that all tasks of one job step agree on, below the range the kernel hands out by itself."""
    return 15000 + (job_id + 7919 * step_id) % 15000


def is_task(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of several tasks.

    A batch script sees most of the same variables as rank 0 of its job would, but it is no task: there srun
    has not run yet, and ``SLURM_STEP_ID`` is missing.
    """
    if environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environ:
        return False
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or "1"
    return "SLURM_PROCID" in environ and "SLURM_LOCALID" in environ and int(tasks) > 1


def torch_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT of this task; set ones are kept.

    Raises:
        ValueError: when the node list or the job id is missing and no MASTER_ADDR / MASTER_PORT says it.
    """
    variables = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
    }
    if "MASTER_ADDR" in environ:
        variables["MASTER_ADDR"] = environ["MASTER_ADDR"]
    else:
        names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        nodes = next((environ[name] for name in names if environ.get(name)), None)
        if nodes is None:
            raise ValueError("SLURM_JOB_NODELIST is not set: set MASTER_ADDR to the host of rank 0")
        variables["MASTER_ADDR"] = expand_nodelist(nodes)[0]
    if "MASTER_PORT" in environ:
        variables["MASTER_PORT"] = environ["MASTER_PORT"]
    else:
        job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
        if job is None:
            raise ValueError("SLURM_JOB_ID is not set: set MASTER_PORT to a free port of the host of rank 0")
        variables["MASTER_PORT"] = str(master_port(int(job), int(environ.get("SLURM_STEP_ID", "0"))))
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if counts:
        node = int(environ.get("SLURM_NODEID", "0"))
        variables["LOCAL_WORLD_SIZE"] = str(tasks_per_node(counts)[node])
    return variables


@dataclass(frozen=True)
class Launch:
    """One launch of a job: what is the same when SLURM requeues the job and its script runs again.

    Attributes:
        step_id: under srun, else None. A launch is known by its config file and overrides; of several that have the
            same the step tells which.
    """

    job_id: str
    step_id: str | None
    config: str
    overrides: tuple[str, ...]

    @classmethod
    def of(cls, environ: Mapping[str, str], config_path: str, overrides: Sequence[str]) -> Launch | None:
        """This launch, None outside of SLURM."""
        job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
        if not job:
            return None
        return cls(job, environ.get("SLURM_STEP_ID"), os.path.abspath(config_path), tuple(overrides))

    def record(self, folder: Path) -> None:
        """Write it into its run folder, beside those of jobs that have used it before."""
        known, draft = _recorded(folder), folder / f"{RECORD}.tmp"
        if self._as_recorded() in known:
            return
        try:
            draft.write_text(json.dumps([*known, self._as_recorded()], indent=2) + "\n")
            draft.replace(folder / RECORD)
        except OSError as error:
            raise ConfigError(f"run folder {folder}: cannot be written to: {error.strerror or error}") from None

    def folder_of(self, folders: Iterable[Path]) -> Path | None:
        """Which of these this launch has used before the job was requeued, None when it has used none.

        The number of the job step may be another now. Of several folders with the same config file and overrides it
        chooses, else the first does.
        """
        same, found = self._as_recorded(), []
        for folder in folders:
            for each in _recorded(folder):
                if each == same:
                    return folder
                if {**each, "step_id": self.step_id} == same:
                    found.append(folder)
        return found[0] if found else None

    def _as_recorded(self) -> dict[str, object]:
        return {**asdict(self), "overrides": list(self.overrides)}


def is_requeued(environ: Mapping[str, str]) -> bool:
    """Whether SLURM has started the job before: it was preempted, its node failed, or somebody requeued it."""
    text = environ.get("SLURM_RESTART_COUNT", "")
    return text.isdecimal() and int(text) >= 1


def _recorded(folder: Path) -> list[dict[str, object]]:
    try:
        found = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return []
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
