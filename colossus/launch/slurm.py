"""The translation of srun's variables into those that torch reads. No torch, no ``scontrol``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from colossus.config import ConfigError


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list.

    It is ``node01`` of ``node[01-03,07],gpu5``, and ``rack1n0-ib`` of ``rack[1-2]n[0-1]-ib``.

    Raises:
        ConfigError: the list cannot be read.
    """
    host = re.sub(r"\[(\d+)[-,\d]*\]", r"\1", nodes.strip()).split(",")[0]
    if not re.fullmatch(r"[\w.-]+", host):
        raise ConfigError(f"srun: cannot read the SLURM node list {nodes!r}: set MASTER_ADDR to the host of rank 0")
    return host


def tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node: [2, 2, 2, 1] of ``2(x3),1``."""
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, nodes in counts for _ in range(int(nodes or 1))]


def master_port(job_id: int, step_id: int = 0) -> int:
    """Return a port that is the same for all tasks of a job step, below the range from which the kernel picks ports."""
    return 15000 + (job_id + 7919 * step_id) % 15000


def is_task(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process as one of several tasks.

    A batch script has most variables of rank 0 of its job, but it is no task: srun has not run yet, and
    ``SLURM_STEP_ID`` is missing.
    """
    if environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environ:
        return False
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or "1"
    return "SLURM_PROCID" in environ and "SLURM_LOCALID" in environ and int(tasks) > 1


def is_one_of_a_node(environ: Mapping[str, str]) -> bool:
    """Return whether srun has started one task on each node, which can start the ranks of its node."""
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    return is_task(environ) and {*tasks_per_node(counts)} == {1}


def rendezvous_endpoint(environ: Mapping[str, str]) -> str:
    """Return the host:port at which the nodes of a job step meet, a port of their first node.

    Raises:
        ConfigError: see `torch_variables`.
    """
    variables = torch_variables(environ)
    return f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"


def torch_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT of this task; set ones stay.

    Raises:
        ConfigError: the node list or the job id is missing, and MASTER_ADDR or MASTER_PORT is not set instead.
    """
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID", "0")
    if not address and not nodes:
        raise ConfigError("srun: SLURM_JOB_NODELIST is not set: set MASTER_ADDR to the host of rank 0")
    if not port and not job:
        raise ConfigError("srun: SLURM_JOB_ID is not set: set MASTER_PORT to a free port of the host of rank 0")
    variables = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "MASTER_ADDR": address or first_host(nodes or ""),
        "MASTER_PORT": port or str(master_port(int(job or 0), int(step))),
    }
    if counts := environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE"):
        variables["LOCAL_WORLD_SIZE"] = str(tasks_per_node(counts)[int(environ.get("SLURM_NODEID", "0"))])
    return variables
