"""The plan of a run that goes on with fewer processes than its config asks for."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.launching import LAUNCH, TINY, children, finish, launch, rows_of, start, wait_for
from helpers.ports import free_port

from colossus.config import Config, ConfigError, load_config, resolve_sizes, state_config
from colossus.config.plans import world_size
from colossus.launch import command
from colossus.launch.auto_plan import fit_plan, resolve_planned


def config_of(changes: Sequence[str] = (), **parallel: Any) -> Config:
    return load_config(
        dict(
            parallel=parallel,
            model=dict(type="GPT", num_layers=4, hidden_size=16, num_heads=4, vocab_size=32, seq_len=8),
            schedule=dict(microbatches=2),
            train=dict(global_batch_size=240),
            launch=dict(min_processes=2),
        ),
        changes,
    )


@pytest.mark.parametrize(
    ("parallel", "processes", "changes"),
    [
        (dict(data=4), 2, ["parallel.data=2", "schedule.microbatches=4"]),
        (dict(data=4), 3, ["parallel.data=3", "schedule.microbatches=4"]),  # 16 each, no more than 6 at a time
        (dict(data=2, tensor=2, pipeline=2), 4, ["parallel.data=1", "schedule.microbatches=4"]),
        (
            dict(data=8, zero=dict(stage=2, shard=4)),
            6,
            ["parallel.data=6", "parallel.zero.shard=3", "schedule.microbatches=4"],
        ),
        (
            dict(data=8, strategy=dict(type="hierarchical", hosts=4)),
            6,
            ["parallel.data=6", "parallel.strategy.hosts=3", "schedule.microbatches=4"],
        ),
        (
            dict(data=12, strategy=dict(type="hierarchical", hosts=4)),
            10,  # on 3 1/3 hosts
            ["parallel.data=10", "parallel.strategy.hosts=2", "schedule.microbatches=3"],
        ),
        (
            dict(data=8, strategy=dict(type="hybrid", per_host=4)),
            2,
            ["parallel.data=2", "parallel.strategy.per_host=2", "schedule.microbatches=8"],
        ),
        (
            dict(data=8, expert=4, zero=dict(stage=1, shard=4)),
            6,  # the number of experts is a multiple of what it was a multiple of
            ["parallel.data=6", "parallel.expert.size=2", "parallel.zero.shard=2", "schedule.microbatches=4"],
        ),
        (
            dict(data=4, sequence=2, expert=8),
            4,
            ["parallel.data=2", "parallel.expert.size=4", "schedule.microbatches=4"],
        ),
        (dict(data=4), 4, []),
        (dict(data=4), 8, []),  # more than the plan has is refused where sizes are compared with processes
    ],
)
def test_data_becomes_smaller_and_the_batch_stays(parallel: dict[str, Any], processes: int, changes: list[str]) -> None:
    config = config_of(**parallel)
    fitted, message = fit_plan(config, processes)
    assert resolve_sizes(fitted) == config_of(changes, **parallel)
    assert bool(message) == bool(changes)
    assert fitted.parallel.model_fields_set == config.parallel.model_fields_set
    if changes:
        assert world_size(fitted.parallel) == processes
        assert fitted.train == config.train
        assert fitted.parallel.tensor == config.parallel.tensor


@pytest.mark.parametrize(
    ("parallel", "processes", "message"),
    [
        (dict(data=2), 1, "launch.min_processes = 2, but there is 1 process"),
        (dict(data=2, tensor=4), 6, r"parallel: tensor 4 = 4 does not divide 6 processes, .* 4 or 8 would do"),
        (dict(data=8), 7, r"with 7 processes: train.global_batch_size = 240 is not a multiple of data 7"),
        (
            dict(data=4, strategy=dict(type="sgp", peers=2)),
            2,
            r"with 2 processes: parallel.strategy.graph = 'exponential' with data 2: peers = 2",
        ),
        (dict(data=4, strategy=dict(type="ad-psgd")), 3, "with 3 processes: .* their number must be even, got 3"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(
    parallel: dict[str, Any], processes: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_plan(config_of(**parallel), processes)


def test_a_plan_that_was_wrong_already_is_refused_by_its_own_numbers() -> None:
    config = dict(parallel=dict(data=4, expert=3), launch=dict(min_processes=1))
    with pytest.raises(ConfigError, match=r"^parallel\.expert = 3 is not a divisor of data 4; use 1 or 2 or 4$"):
        resolve_planned(state_config(config), 2)


def test_without_the_key_the_plan_is_the_config_s() -> None:
    config = config_of(data=4)
    config = config.model_copy(update={"launch": config.launch.model_copy(update={"min_processes": None})})
    assert fit_plan(config, 2) == (config, [])


@pytest.mark.usefixtures("no_processes")
def test_a_job_that_is_started_again_with_fewer_processes_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As SLURM and torchrun start it: the number of processes is what they say."""
    configs: list[Any] = []
    monkeypatch.setattr(command, "run_worker", lambda load, **options: configs.append(load()) or 0)
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    assert command.run(str(TINY), ["launch.min_processes=1"]) == 0
    assert [(config.parallel.data, config.schedule.microbatches) for config in configs] == [(1, 2)]
    assert "plan        data 1, 2 microbatches: 1 of 2 processes" in capsys.readouterr().out
    assert command.run(str(TINY), []) == 2
    assert "data 2, but 1 process" in capsys.readouterr().err


@pytest.mark.long
def test_a_run_goes_on_with_fewer_processes_and_follows_the_undisturbed_one(tmp_path: Path) -> None:
    keys = ["launch.min_processes=1", "train.precision=fp64", "train.eval_every=0", "checkpoint.every=2"]
    code, _, err = launch(tmp_path, *keys, "train.steps=4", "train.schedule_steps=8")
    assert (code, err) == (0, "")
    code, out, err = launch(tmp_path, *keys, "--nproc", "1", "train.steps=8", "checkpoint.resume=auto")
    assert (code, err) == (0, ""), out
    words = [*LAUNCH, "--run-dir", "whole", *keys, "train.steps=8"]
    assert finish(start(words, tmp_path))[0] == 0
    rows, whole = rows_of(tmp_path / "run"), rows_of(tmp_path / "whole")
    assert [row["step"] for row in rows] == [*range(1, 9)]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in whole], rel=1e-12)


@pytest.mark.long
def test_torchrun_goes_on_with_the_node_that_is_left(tmp_path: Path) -> None:
    keys = ["train.precision=fp64", "launch.min_processes=1", "checkpoint.resume=auto"]
    restarted = str(TINY.with_name("restarted.py"))
    whole = [*LAUNCH[:-1], restarted, "--run-dir", "whole", *keys]
    code, _, err = finish(start(whole, tmp_path))
    assert (code, err) == (0, "")
    nodes = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "2", "--local-addr", "127.0.0.1"]
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-conf"]
    waits = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,is_host="
    variables = {"TROUBLES": "hang@5", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    first, second = (
        start(
            [sys.executable, "-m", "torch.distributed.run", *nodes, *meet, waits + is_host, *LAUNCH[1:-1], restarted]
            + ["--run-dir", "run", *keys],
            tmp_path,
            **variables,
        )
        for is_host in ("1", "0")
    )
    wait_for((tmp_path / "met-0").exists, first.pid, second.pid)
    for pid in (second.pid, *children(second.pid)):
        os.kill(pid, signal.SIGKILL)
    finish(second)
    code, out, err = finish(first)
    assert code == 0, out + err
    assert "plan        data 1, 4 microbatches: 1 of 2 processes" in out
    rows, undisturbed = rows_of(tmp_path / "run"), rows_of(tmp_path / "whole")
    assert [row["step"] for row in rows] == [*range(1, 9)]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in undisturbed], rel=1e-10)
