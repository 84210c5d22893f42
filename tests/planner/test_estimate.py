"""Estimates: FLOPs as they are counted, experts as they run, parts that add up, microbatches, scores, the search."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from helpers.real_sizes import LLAMA_70B, run_of

from colossus.cli.plan_table import plan_words
from colossus.config import Config, load_config
from colossus.hardware.data_sheets import FromDataSheet
from colossus.hardware.hardware import Hardware
from colossus.hardware.typical_cpu import TypicalCPU
from colossus.monitor.mfu import flops_per_token
from colossus.planner import estimate as estimates
from colossus.planner.candidates import plans
from colossus.planner.estimate import Estimator
from colossus.planner.fixed_keys import FixedKeys
from colossus.planner.layout_profile import profile_layout
from colossus.planner.model_layouts import SCOPES, layouts
from colossus.planner.plan_estimate import PlanEstimate
from colossus.planner.score import score
from colossus.planner.search import search
from colossus.planner.trace import Product

MODEL = dict(type="GPT", num_layers=4, hidden_size=64, num_heads=4, vocab_size=256, seq_len=64)
CPU = TypicalCPU(cores=2, threads=1, memory=4e9)
H100 = FromDataSheet("h100")


def _config(model: dict[str, Any] = MODEL, **sections: Any) -> Config:
    train = {"global_batch_size": 16, **sections.pop("train", {})}
    return load_config(dict(model=model, data=dict(type="PythonStdlib"), train=train, **sections))


@pytest.mark.parametrize(
    "model", [MODEL, dict(type="Llama", num_layers=2, hidden_size=64, num_heads=4, vocab_size=320, seq_len=32)]
)
def test_flops_are_those_that_utilisation_counts(model: dict[str, Any]) -> None:
    config = _config(model)
    estimate = Estimator(H100).estimate(config)
    expected = flops_per_token(config.model.spec())  # type: ignore[union-attr]
    assert expected is not None
    assert estimate.flops == pytest.approx(expected * estimate.tokens)
    assert estimate.tokens == 16 * model["seq_len"]


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.long)])
def test_plans_that_differ_in_the_scope_of_rows_share_a_recording(recompute: str) -> None:
    """Under ZeRO 1D neither moves nor casts weights: the recordings of all scopes are one."""
    recorded = []
    for scope in SCOPES:
        tensor = dict(size=4, sequence_sharded=True, weights=scope)
        train = dict(precision="bf16", activation_checkpoint=recompute)
        blocks = profile_layout(_config(parallel=dict(tensor=tensor), train=train), is_sharded=True).blocks
        recorded.append(
            [{**vars(block), "forward": vars(block.forward), "backward": vars(block.backward)} for block in blocks]
        )
    assert recorded[0] == recorded[1] == recorded[2]
    estimator = Estimator(H100)
    profiles = {
        id(estimator.profile(_config(parallel=dict(data=2, zero=3, tensor=dict(size=2, weights=scope)))))
        for scope in SCOPES
    }
    assert len(profiles) == 1


def test_a_gpu_multiplies_all_experts_at_once() -> None:
    model = dict(type="Llama", num_layers=1, hidden_size=64, num_heads=4, seq_len=32, experts=dict(num=4, top_k=2))
    config, most = _config(model, train=dict(precision="bf16", global_batch_size=1)), {}
    shapes: list[Counter[tuple[float, ...]]] = []
    for on_cpu in (True, False):
        block = profile_layout(config, on_cpu=on_cpu).blocks[1]
        products = [x for trace in (block.forward, block.backward) for x in trace.events if isinstance(x, Product)]
        most[on_cpu] = max(product.count for product in products)
        shapes.append(Counter())
        for product in products:  # [m, k] x [k, n], or both transposed
            shapes[-1][(*sorted((product.m, product.n)), product.k)] += product.count
    assert most == {True: 1, False: 4}
    assert shapes[0] == shapes[1]


PLANS: dict[str, dict[str, Any]] = {
    "data": dict(parallel=dict(data=4)),
    "zero_3": dict(parallel=dict(data=4, zero=3), schedule=dict(microbatches=2)),
    "1f1b": dict(parallel=dict(pipeline=2, tensor=2), schedule=dict(microbatches=4)),
    "zb-h1": dict(parallel=dict(pipeline=2), schedule=dict(type="zb-h1", microbatches=4)),
    "2d_step": dict(parallel=dict(tensor=dict(size=4, mode="2d", weights="step")), schedule=dict(microbatches=2)),
}


@pytest.mark.rest("data-h100", "zero_3-cpu", "1f1b-h100", "zb-h1-cpu", "2d_step-cpu")
@pytest.mark.parametrize("hardware", [CPU, H100], ids=["cpu", "h100"])
@pytest.mark.parametrize("name", PLANS)
def test_parts_add_up(name: str, hardware: Hardware) -> None:
    estimate = Estimator(hardware).estimate(_config(**PLANS[name]))
    assert sum(estimate.parts.values()) == pytest.approx(estimate.seconds, rel=1e-6)
    assert all(seconds > 0 for seconds in estimate.parts.values())
    assert all(cost.exposed <= cost.seconds * (1 + 1e-9) for cost in estimate.axes.values())


@pytest.mark.parametrize(
    "schedule", [dict(type="1f1b"), dict(type="interleaved", chunks=2), dict(type="zb-h1")], ids=lambda one: one["type"]
)
def test_many_microbatches_go_on_as_few_do(schedule: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(parallel=dict(pipeline=2), schedule={**schedule, "microbatches": 16})
    estimator = Estimator(H100)
    extended = estimator.estimate(config)
    monkeypatch.setattr(estimates, "_FEW", 100)
    played: PlanEstimate = estimator.estimate(config)
    assert extended.seconds == pytest.approx(played.seconds, rel=0.01)
    assert extended.memory == played.memory
    assert {axes: cost.bytes for axes, cost in extended.axes.items()} == pytest.approx(
        {axes: cost.bytes for axes, cost in played.axes.items()}
    )


@pytest.mark.rest("data", "1f1b")
@pytest.mark.parametrize("name", PLANS)
def test_a_score_is_near_the_estimate(name: str) -> None:
    config, estimator = _config(**PLANS[name]), Estimator(H100)
    profile = estimator.profile(config, split_backward=False)
    rough = score(config, profile, estimator.player(config), times=1.0, most=80e9)
    assert rough.seconds == pytest.approx(estimator.estimate(config).seconds, rel=0.3)


def test_a_score_waits_for_gradients_that_are_reduced_after_each_microbatch() -> None:
    """ZeRO 3 in a pipeline frees weights and gradients after each microbatch: only those of the last run beside it."""
    parallel, schedule = dict(data=8, pipeline=2, zero=3), dict(type="interleaved", chunks=2, microbatches=8)
    model, train = {**MODEL, "hidden_size": 1024}, dict(global_batch_size=64)
    config, estimator = _config(model, parallel=parallel, schedule=schedule, train=train), Estimator(H100, hosts=16)
    profile = estimator.profile(config, split_backward=False)
    rough = score(config, profile, estimator.player(config), times=1.0, most=80e9)
    assert rough.seconds == pytest.approx(estimator.estimate(config).seconds, rel=0.02)


@pytest.mark.long
def test_the_search_has_the_best_of_all_layouts_of_a_large_model() -> None:
    """Llama 3 70B on 64 devices of 80 GB: the best of all layouts, each recorded once, has 69.28 s."""
    config = load_config(run_of(LLAMA_70B, layers=80, samples=8, data=64, zero=3))
    result = search(config, H100, devices=64, hosts=8, memory=80e9)
    assert result.plans[0].seconds < 69.5
    assert plan_words(result.plans[0].config).startswith("data 4 x pipeline 4 x tensor 4 (1d, ")


@pytest.mark.long
@pytest.mark.parametrize(
    ("hardware", "model", "most"),
    [
        (CPU, MODEL, 1.4),
        (H100, {**MODEL, "hidden_size": 2048, "num_heads": 16, "vocab_size": 32768, "seq_len": 1024}, 1.1),
    ],
    ids=["cpu", "h100"],
)
def test_the_search_finds_what_trying_all_finds(hardware: Hardware, model: dict[str, Any], most: float) -> None:
    """It looks at some layouts only. With all memory, with little, and with hardly more than the smallest plan needs.

    The formulas that put layouts in order do not count starts of operators, of which small models consist.
    """
    config = _config(model, train=dict(global_batch_size=8))
    estimator, fixed = Estimator(hardware), FixedKeys.of(config)
    every = [
        estimator.estimate(candidate.config) for layout in layouts(fixed, 4) for candidate in plans(fixed, 4, layout)
    ]
    needs = sorted(plan.memory.fullest.total for plan in every)
    smallest = 1.02 * needs[0]
    for memory in (hardware.memory_bytes, *(needs[len(needs) // part] for part in (2, 4, 8, 16, 64)), smallest):
        best = min(plan.seconds for plan in every if plan.memory.fullest.total <= memory)
        result = search(config, hardware, devices=4, memory=memory)
        assert result.plans[0].seconds <= (1.1 if memory == hardware.memory_bytes else most) * best, memory / smallest
        assert all(plan.memory.fullest.total <= memory for plan in result.plans)
    again = search(config, hardware, devices=4, memory=smallest, top=1)
    assert again.plans[0].overrides == result.plans[0].overrides


def test_the_plans_that_most_people_run_are_listed() -> None:
    """Llama 3 70B on 64 devices of 80 GB: FSDP fits with full recomputation, and two copies do, but no copy a host."""
    config = load_config(run_of(LLAMA_70B, layers=80, data=64, zero=3))
    alone = dict(tensor=1, sequence=1, pipeline=1)
    result = search(config, FromDataSheet("h100"), devices=64, hosts=8, memory=80e9, keep=alone, usual=True)
    fsdp, hsdp = result.usual["FSDP"], result.usual["HSDP"]
    assert result.plans[0] == fsdp
    assert plan_words(fsdp.config) == "data 64, ZeRO 3, full checkpointing"
    assert plan_words(hsdp.config) == "data 64, ZeRO 3 in groups of 32, full checkpointing"
    assert (fsdp.memory.fullest.total, hsdp.memory.fullest.total) == pytest.approx((44.9e9, 67.4e9), rel=0.02)
    zero = dict(stage=3, shard=8)
    by_host = load_config(run_of(LLAMA_70B, layers=80, data=64, zero=zero, recompute="full"))
    assert Estimator(H100, hosts=8).estimate(by_host).memory.fullest.total == pytest.approx(201e9, rel=0.01)


def test_usual_plans_of_hosts_are_listed_with_the_least_recomputation_that_fits() -> None:
    config = _config(train=dict(global_batch_size=8))
    result = search(config, H100, devices=8, hosts=4, keep=dict(sequence=1), usual=True)
    words = {name: plan_words(plan.config).partition(", ZeRO")[0] for name, plan in result.usual.items()}
    assert words == {
        "FSDP": "data 8",
        "HSDP": "data 8",
        "1D x FSDP": "data 4 x tensor 2 (1d)",
        "1D split x FSDP": "data 4 x tensor 2 (1d, sequence sharded)",
        "1D x pipeline": words["1D x pipeline"],
        "1D split x pipeline": words["1D split x pipeline"],
    }
    assert all("x pipeline" in words[name] for name in ("1D x pipeline", "1D split x pipeline"))
    assert {plan.config.train.activation_checkpoint.type for plan in result.usual.values()} == {"none"}
