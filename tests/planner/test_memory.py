"""Predicted memory follows from few blocks and one rank; `test_fake_step` puts it beside that of real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.plan_cases import MB4, config_of_case

from colossus.config import load_config
from colossus.planner import block_runs
from colossus.planner.memory import predict_memory
from colossus.planner.plan_estimate import PlanMemory


def _predict(**changes: Any) -> PlanMemory:
    plan = changes.pop("parallel")
    return predict_memory(load_config(config_of_case((plan, changes))))


def test_blocks_that_are_not_run_count(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dict(parallel=dict(pipeline=2), model=dict(num_layers=11), **MB4)
    few = _predict(**case)
    monkeypatch.setattr(block_runs, "_RUN", 100)
    assert few == _predict(**case)


def test_a_plan_of_thousands_of_ranks() -> None:
    config = dict(
        parallel=dict(data=64, pipeline=8, tensor=8, zero=1),
        model=dict(type="Llama", num_layers=30, hidden_size=512, num_heads=8, vocab_size=1024, seq_len=128),
        schedule=dict(microbatches=16),
        train=dict(global_batch_size=1024, precision="bf16"),
    )
    plan = predict_memory(load_config({**config_of_case(({}, {})), **config}))
    assert [rank.in_flight for rank in plan.ranks] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert plan.fullest.rank == 1  # the first has the embedding alone
