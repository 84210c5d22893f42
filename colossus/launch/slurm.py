"""The variables that srun sets, translated into those that torch reads. No torch, no ``scontrol``."""

from __future__ import annotations

import re
from collections.abc import Mapping

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def first_host(nodes: str) -> str:
    """Of a SLURM node list: ``node01`` of ``node[01-03,07],gpu5``, ``rack1n0-ib`` of ``rack[1-2]n[0-1]-ib``.

    Raises:
        ValueError: when it is not understood.
    """
    found = re.sub(r"\[(\d+)[-,\d]*\]", r"\1", nodes.strip()).split(",")[0]
    if not re.fullmatch(r"[\w.-]+", found):
        raise ValueError(f"cannot read the SLURM node list {nodes!r}: set MASTER_ADDR to the host of rank 0")
    return found


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
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
        if not nodes:
            raise ValueError("SLURM_JOB_NODELIST is not set: set MASTER_ADDR to the host of rank 0")
        variables["MASTER_ADDR"] = first_host(nodes)
    if "MASTER_PORT" in environ:
        variables["MASTER_PORT"] = environ["MASTER_PORT"]
    else:
        job = environ.get("SLURM_JOB_ID")
        if job is None:
            raise ValueError("SLURM_JOB_ID is not set: set MASTER_PORT to a free port of the host of rank 0")
        variables["MASTER_PORT"] = str(master_port(int(job), int(environ.get("SLURM_STEP_ID", "0"))))
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if counts:
        node = int(environ.get("SLURM_NODEID", "0"))
        variables["LOCAL_WORLD_SIZE"] = str(tasks_per_node(counts)[node])
    return variables
