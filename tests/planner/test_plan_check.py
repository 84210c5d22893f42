"""Predictions of plans beside what is counted without values: what agrees, what differs, and how it is told."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.plan_cases import CASES, FOUR, MB2, MORE_CASES, TRAFFIC, config_of_case
from helpers.real_sizes import LLAMA_8B, run_of

import colossus
from colossus.config import load_config
from colossus.hardware.data_sheets import FromDataSheet
from colossus.hardware.hardware import Hardware
from colossus.hardware.typical_cpu import TypicalCPU
from colossus.planner.estimate import Estimator
from colossus.planner.plan_check import CheckReport, check
from colossus.planner.plan_estimate import AxisCost, PlanEstimate

ROOT = Path(colossus.__file__).parent.parent


def _estimate(name: str) -> PlanEstimate:
    cases = {**CASES, **MORE_CASES, **FOUR}
    config = load_config(config_of_case(cases[name]), nproc=4 if name in FOUR else 2)
    return Estimator(FromDataSheet("h100")).estimate(config)


def _checked(name: str) -> CheckReport:
    estimate = _estimate(name)
    return check(estimate)


def test_a_plan_is_as_predicted() -> None:
    hook = sys.excepthook
    report = _checked("pipeline_zero_1")
    assert report.is_equal, report.render()
    assert sys.excepthook is hook  # torch's names a rank in front of every line
    assert {row.what for row in report.axes} == {"data", "pipeline", "pipelinexdata"}
    assert [(rank.step.rank, rank.step.pipeline_rank) for rank in report.ranks] == [(0, 0), (2, 1)]


@pytest.mark.long
def test_a_reference_beside_the_model_and_both_texts_of_a_pair_are_counted() -> None:
    plan = ["parallel.data=2", "parallel.zero=3", "model.num_layers=1", "model.loss_chunk=1024"]
    config = load_config(str(ROOT / "configs" / "dpo_stdlib.py"), plan, nproc=2)
    estimate = Estimator(FromDataSheet("h100")).estimate(config)
    assert estimate.tokens == 16  # pairs
    report = check(estimate)
    assert report.is_equal, report.render()
    assert 0.95 < report.ranks[0].ratio < 1.05


def test_the_engines_own_operators_take_as_long_as_predicted() -> None:
    """Under FSDP weights and gradients are copied, and one microbatch adds no gradients."""
    hardware = FromDataSheet("h100")
    hardware.occupied = 0.0  # a play knows no contention
    config = load_config(run_of(LLAMA_8B, layers=2, recompute="full", data=8, zero=3))
    report = check(Estimator(hardware).estimate(config), hardware=hardware)
    what, predicted, played = report.seconds[0]
    assert what == "step"
    assert predicted == pytest.approx(played, rel=0.01)


@pytest.mark.long
def test_what_differs_is_told() -> None:
    estimate = _estimate("zero_3")
    cost = estimate.axes["data"]
    full = estimate.memory.ranks[0]
    stored = replace(full.stored, weights=full.stored.weights + 4)
    wrong = replace(
        estimate,
        axes={"data": AxisCost(cost.bytes - 1024.0), "tensor": AxisCost(8.0)},
        memory=replace(estimate.memory, ranks=(replace(full, stored=stored),)),
    )
    report = check(wrong)
    assert not report.is_equal
    text = report.render()
    assert "a step of rank 0 of 2 " in text
    lines = {
        line.split()[1] if line.lstrip().startswith("0 ") else line.split()[0]: line
        for line in text.splitlines()
        if line
    }
    assert lines["data"].endswith("counted +1,024 B")
    assert lines["tensor"].endswith("counted -8 B")
    assert lines["weights"].endswith("counted -4 B")
    assert lines["optimizer"].endswith("equal")
    as_json = json.loads(json.dumps(report.as_json()))
    assert as_json["equal"] is False
    assert [(row["what"], row["equal"]) for row in as_json["axes"]] == [("data", False), ("tensor", False)]
    assert as_json["ranks"][0]["peak"]["ratio"] == pytest.approx(report.ranks[0].ratio)
    moved = as_json["ranks"][0]["operations"]
    assert sum(row["bytes"] for row in moved if row["axes"] == "data") == pytest.approx(cost.bytes)


@pytest.mark.long
def test_blocks_that_are_not_profiled_count() -> None:
    """Of equal blocks a few are: gradients of the norms of all are summed over the ranks that split tokens."""
    plan = dict(pipeline=2, tensor=dict(size=2, sequence_sharded=True))
    case = (plan, dict(model=dict(num_layers=7, tie_embeddings=False, type="Llama"), **MB2))
    estimate = Estimator(FromDataSheet("h100")).estimate(load_config(config_of_case(case), nproc=4))
    report = check(estimate)
    assert report.is_equal, report.render()


@pytest.mark.long
@pytest.mark.parametrize("name", [*CASES, *MORE_CASES, *FOUR])
def test_all_plans_are_as_predicted(name: str) -> None:
    report = _checked(name)
    assert report.is_equal, report.render()
    most = 1.4 if "zero_3" in name or name == "sgd" else 1.1
    assert all(0.9 <= rank.ratio <= most for rank in report.ranks), report.render()


@pytest.mark.parametrize("hardware", [FromDataSheet("h100"), TypicalCPU(4, 1, 8e9)], ids=["gpu", "cpu"])
@pytest.mark.parametrize(
    ("world", "name"),
    [
        pytest.param(world, name, marks=[pytest.mark.long] * (name not in ("buckets", "hsdp")))
        for world in TRAFFIC
        for name in TRAFFIC[world]
    ],
)
def test_collectives_of_weights_and_gradients_are_as_predicted(world: int, name: str, hardware: Hardware) -> None:
    """A CPU's flat tensors fit a slot of shared memory."""
    config = load_config(config_of_case(TRAFFIC[world][name]), nproc=world)
    estimate = Estimator(hardware).estimate(config)
    report = check(estimate, hardware=hardware)
    assert report.is_equal, report.render()
