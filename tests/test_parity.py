"""The same model, seed and data give the same training run under every plan, and it is plain torch's run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import features
from helpers.features import ARRAY, FACTORS, Row
from helpers.laws import FP32, FP64, TrainingRanks, assert_parity
from helpers.long import but, long
from helpers.plans import plans
from helpers.training import SIZES, Trace, assert_is_plain_torch, assert_same_run, config_of, run_plan, shared_run
from helpers.twins import PlainGPT

#: in float64 a few steps tell as much as many
STEPS, FEW_STEPS = 20, 3

#: levels that the covering array has not, and plain combinations
PLANS = plans(
    "1d_4", "2.5d", "3d", "data2_pipeline2_1d", "tensor_outside", "data2_1d", "pipeline2", "hybrid4", "pipeline2_2d",
    "data2_2d",
)  # fmt: skip
#: more of the config
MORE: dict[str, dict[str, Any]] = {
    "data2_pipeline2_1d": dict(schedule=dict(type="1f1b", microbatches=4)),
    "data2_1d": dict(comm=dict(bucket_mb=0.002)),
    "pipeline2": dict(schedule=dict(type="gpipe", microbatches=2)),
    "hybrid4": dict(model=dict(seq_len=16)),
    "pipeline2_2d": dict(schedule=dict(type="zb-h1", microbatches=4)),
}
#: not by default: the array has their features in other products
LONG = ("2.5d", "3d", "data2_pipeline2_1d", "data2_1d", "data2_2d")


@pytest.mark.parametrize("row", ARRAY, ids=" ".join)
def test_each_pair_of_features_follows_the_one_process_run(row: Row, training_ranks: TrainingRanks) -> None:
    reference = training_ranks.reference(features.reference_of_row(row), features.STEPS)
    traces = training_ranks.run(features.ranks_of_row(row), features.config_of_row(row), features.STEPS)
    assert_parity(traces, reference, row[list(FACTORS).index("precision")])


def test_the_array_has_every_pair_of_features() -> None:
    assert features.missing_pairs(ARRAY) == [], "python -m helpers.features makes an array that has them"
    assert all(map(features.is_allowed, ARRAY))


@pytest.mark.long
@pytest.mark.parametrize("model", FACTORS["model"])
@pytest.mark.parametrize("tensor", FACTORS["tensor"])
def test_every_product_of_plans_follows_it(tensor: str, model: str, training_ranks: TrainingRanks) -> None:
    """All products of what splits a model, of 8 ranks at most, in float64."""
    plain = dict(weights="matmul", recompute="none", precision="fp64", optimizer="AdamW")
    for row in features.all_rows(tensor=tensor, model=model, **plain):
        reference = training_ranks.reference(features.reference_of_row(row), features.STEPS)
        traces = training_ranks.run(features.ranks_of_row(row), features.config_of_row(row), features.STEPS)
        assert_parity(traces, reference, "fp64", " ".join(row))


def alone(precision: str, variant: str | None = None, steps: int = STEPS) -> Trace:
    return shared_run(1, config_of({}, steps, precision, **(FACTORS["model"][variant] if variant else {})), steps)[0]


@pytest.mark.rest("pipeline2_2d-fp64-3")
@pytest.mark.parametrize(
    ("precision", "steps"),
    [("fp64", FEW_STEPS), *(pytest.param(name, STEPS, marks=pytest.mark.long) for name in ("fp64", "fp32"))],
)
@pytest.mark.parametrize("plan", but(LONG, PLANS))
def test_every_plan_follows_the_one_process_run(plan: str, precision: str, steps: int) -> None:
    (world, parallel), more = PLANS[plan], MORE.get(plan, {})
    one = {key: value for key, value in more.items() if key == "model"}
    reference = shared_run(1, config_of({}, steps, precision, **one), steps)[0]
    assert_parity(shared_run(world, config_of(parallel, steps, precision, **more), steps), reference, precision)


@pytest.mark.parametrize(
    "row",
    [
        "1d_sharded one alone",
        *long(
            "1d_sharded one replicas",
            "2d_2x1 one zero2",
            "2.5d accumulated alone",
            "3d one alone",
            "1d 1f1b zero1",
            "whole zb-v zero3",
            "whole one alone ring",
            "1d one alone ulysses",
        ),
    ],
)
def test_twenty_steps_in_float32(row: str) -> None:
    """Rounding does not grow."""
    levels = dict(zip(FACTORS, row.split(), strict=False), precision="fp32")
    config = features.config_of_row(features.completed(levels))
    world = features.ranks_of_row(features.completed(levels))
    reference = shared_run(1, {**config, "parallel": {}, "schedule": {}}, STEPS)[0]
    assert_parity(run_plan(world, config, STEPS), reference, "fp32")


@pytest.mark.long
def test_depth_is_a_data_axis() -> None:
    """2.5D with a depth of 2 is 2D on two data ranks, to the last bit."""
    deep, wide = (
        shared_run(PLANS[plan][0], config_of(PLANS[plan][1], FEW_STEPS, "fp64"), FEW_STEPS)[0]
        for plan in ("2.5d", "data2_2d")
    )
    assert deep.losses == wide.losses
    assert all(torch.equal(deep.end[name], value) for name, value in wide.end.items())


@pytest.mark.parametrize("steps", [FEW_STEPS, *long(STEPS)])
@pytest.mark.parametrize("variant", [None, "llama_like", "loss_terms"])
def test_one_process_is_plain_torch(variant: str | None, steps: int) -> None:
    """Losses, norms, every gradient and the weights after some steps, against torch's own modules and loop."""
    trace = alone("fp64", variant, steps)
    options = {**SIZES, **(FACTORS["model"][variant].get("model", {}) if variant else {})}
    twin = PlainGPT(**options).double()
    assert_is_plain_torch(trace, twin, options, steps)


@pytest.mark.parametrize(
    ("precision", "tolerance", "steps"),
    [("fp64", FP64, FEW_STEPS), pytest.param("fp32", FP32, STEPS, marks=pytest.mark.long)],
)
def test_a_halved_layernorm_gradient_is_seen(precision: str, tolerance: dict[str, float], steps: int) -> None:
    """The comparison above is able to fail: half of one LayerNorm's gradient passes loss and global norm at first."""
    name = "blocks.1.mlp_norm.weight"
    traces = run_plan(4, config_of(dict(data=2, tensor=2), steps, precision), steps, name)
    reference = alone(precision, steps=steps)
    with pytest.raises(AssertionError):
        assert_same_run(traces[0], reference, **tolerance)
    with pytest.raises(AssertionError, match=name):
        assert_same_run(traces[0], reference, loss=1e9, norm=1e9, parameter=tolerance["parameter"])
