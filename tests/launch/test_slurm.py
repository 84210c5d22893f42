"""SLURM's variables, read without SLURM."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.launching import finish, rows_of, start_slurm_tasks

from colossus.config import ConfigError
from colossus.launch import slurm
from colossus.launch.command import worker_variables

TASK = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
STEP = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "node02",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_NODEID": "0",
}


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("node[01-03,07],gpu5", "node01"),
        ("a,b,c", "a"),
        ("rack[1-2]n[0-1]-ib", "rack1n0-ib"),
        ("host-1.example.org", "host-1.example.org"),
        *((text, None) for text in ("node[1-3", "node[[1]]", "node[a-b]", "")),
    ],
)
def test_the_first_host_of_a_node_list(text: str, host: str | None) -> None:
    if host is None:
        with pytest.raises(ConfigError, match="SLURM node list"):
            slurm.first_host(text)
    else:
        assert slurm.first_host(text) == host


def test_a_task_gets_torchs_variables() -> None:
    assert worker_variables(TASK) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "node01",
        "MASTER_PORT": str(slurm.master_port(123456)),
    }
    assert slurm.tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    ports = {slurm.master_port(job, step) for job in (1, 99999, 10**8) for step in range(5)}
    assert len(ports) == 15
    assert all(1024 < port < 32768 for port in ports)  # no ephemeral ones


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4711"}, {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4711"}),
        (STEP, {"WORLD_SIZE": "2", "MASTER_ADDR": "node02", "LOCAL_WORLD_SIZE": "2"}),
        (TORCHRUN, TORCHRUN),
    ],
)
def test_what_was_set_the_step_and_torchrun_come_first(more: dict[str, str], wanted: dict[str, str]) -> None:
    variables = worker_variables({**TASK, **more})
    assert variables is not None
    assert wanted.items() <= variables.items()


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"},
        # the script of a batch job: its tasks are started later, by srun
        {**{key: value for key, value in TASK.items() if key != "SLURM_STEP_ID"}, "ENVIRONMENT": "BATCH"},
        {"RANK": "0", "WORLD_SIZE": "2"},
    ],
)
def test_not_a_worker(environ: dict[str, str]) -> None:
    assert worker_variables(environ) is None


@pytest.mark.parametrize(
    ("missing", "hint"), [("SLURM_JOB_NODELIST", "set MASTER_ADDR"), ("SLURM_JOB_ID", "set MASTER_PORT")]
)
def test_a_missing_variable_says_what_to_set(missing: str, hint: str) -> None:
    environ = {key: value for key, value in TASK.items() if key != missing}
    with pytest.raises(ConfigError, match=f"{missing} is not set: {hint}"):
        worker_variables(environ)


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_what_mpirun_starts_several_times_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"mpirun has started this command 2 times.*{name}.*--nproc 2"):
        worker_variables({name: "2"})
    assert worker_variables({name: "1"}) is None
    assert worker_variables({name: "2", **TORCHRUN}) == TORCHRUN


def test_one_task_of_a_node_starts_its_ranks(tmp_path: Path) -> None:
    """``srun --ntasks-per-node 1 colossus launch FILE --nnodes 2 --nproc 2``, both nodes being this machine."""
    tasks = start_slurm_tasks(
        tmp_path, "--nnodes", "2", "--nproc", "2", "--run-dir", "run", "parallel.data=4", "train.steps=3",
        SLURM_TASKS_PER_NODE="1(x2)",
    )  # fmt: skip
    ended = [finish(task) for task in tasks]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2, 3]
