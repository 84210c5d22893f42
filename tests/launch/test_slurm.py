"""SLURM's variables, read without SLURM."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu5", ["gpu5"]),
        ("node[01-03,07],gpu5", ["node01", "node02", "node03", "node07", "gpu5"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[009-011]", ["n009", "n010", "n011"]),
        ("a,b,c", ["a", "b", "c"]),
        ("rack[1-2]n[0-1]-ib", ["rack1n0-ib", "rack1n1-ib", "rack2n0-ib", "rack2n1-ib"]),
        ("host-1.example.org", ["host-1.example.org"]),
    ],
)
def test_node_lists(text: str, hosts: list[str]) -> None:
    assert slurm.expand_nodelist(text) == hosts


@pytest.mark.parametrize("text", ["node[1-3", "node1]", "node[[1]]", "node[a-b]", "node[]"])
def test_a_broken_node_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="SLURM node list"):
        slurm.expand_nodelist(text)


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 20)), min_size=1, max_size=6), st.integers(1, 5))
def test_ranges_expand_to_what_they_were_made_of(ranges: list[tuple[int, int]], width: int) -> None:
    inside = ",".join(f"{first:0{width}d}-{first + more:0{width}d}" for first, more in ranges)
    wanted = [f"n{number:0{width}d}x" for first, more in ranges for number in range(first, first + more + 1)]
    assert slurm.expand_nodelist(f"n[{inside}]x,last") == [*wanted, "last"]


def test_tasks_per_node() -> None:
    assert slurm.tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ValueError, match="tasks per node"):
        slurm.tasks_per_node("two")


def test_a_task_gets_torchs_variables() -> None:
    variables = worker_variables(TASK)
    assert variables == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "node01",
        "MASTER_PORT": str(slurm.master_port(123456)),
    }


def test_set_variables_win() -> None:
    variables = worker_variables({**TASK, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4711"})
    assert variables is not None
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.1", "4711")


def test_a_step_counts_before_its_job() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "node02", "SLURM_STEP_TASKS_PER_NODE": "2"}
    variables = worker_variables({**TASK, **step, "SLURM_NODEID": "0"})
    assert variables is not None
    assert (variables["WORLD_SIZE"], variables["MASTER_ADDR"]) == ("2", "node02")


def test_the_ports_of_two_steps_of_one_job_differ_and_are_no_ephemeral_ones() -> None:
    ports = {slurm.master_port(job, step) for job in (1, 99999, 10**8) for step in range(5)}
    assert len(ports) == 15
    assert all(1024 < port < 32768 for port in ports)


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


def test_torchruns_variables_come_before_slurms() -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert worker_variables({**TASK, **torchrun}) == torchrun


@pytest.mark.parametrize(
    ("missing", "hint"), [("SLURM_JOB_NODELIST", "set MASTER_ADDR"), ("SLURM_JOB_ID", "set MASTER_PORT")]
)
def test_a_missing_variable_says_what_to_set(missing: str, hint: str) -> None:
    environ = {key: value for key, value in TASK.items() if key != missing}
    with pytest.raises(ConfigError, match=f"{missing} is not set: {hint}"):
        worker_variables(environ)
