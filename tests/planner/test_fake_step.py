"""Steps of the real engine on tensors without values beside the same steps of real ranks: bytes and calls by operation
and axes, bytes stored, and the peak that the allocator of a real rank has seen. Predicted memory, too."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers.measured_ranks import Measured, measured_ranks
from helpers.plan_cases import CASES, FOUR, MB2, MB4, MORE_CASES, Case, Spare, config_of_case
from helpers.real_sizes import LLAMA_8B, LLAMA_70B, TOKENS_SPLIT, run_of
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from colossus.config import ConfigError, load_config
from colossus.planner.fake_step import RankStep, fake_steps
from colossus.planner.memory import predict_memory
from colossus.planner.plan_estimate import RankMemory

#: whose memory is predicted, too
PREDICTED = {**CASES, **MORE_CASES, **FOUR}
TWO = {
    **CASES,
    **MORE_CASES,
    "unused": (dict(data=2), dict(model=dict(type=Spare), **MB2)),
    "unused_zero": (dict(data=2, zero=2), dict(model=dict(type=Spare), **MB2)),
}
DEFAULT = ("zero_3", "pipeline")
EIGHT: dict[str, Case] = {
    "2.5d": (dict(tensor=dict(mode="2.5d", size=8, depth=2)), MB2),
    "3d": (dict(tensor=dict(mode="3d", size=8)), MB2),
    "zb_2d": (
        dict(pipeline=2, tensor=dict(mode="2d", size=4)),
        dict(model=dict(num_layers=4), schedule=dict(type="zb-h1", microbatches=4)),
    ),
}
#: least peaks over the allocated ones. In 3D it is 1.00 without pytest, where the profiler sees 0.1 MB less: the reason
#: is not known
LEAST = {"3d": 0.88}


def _compare(world: int, cases: dict[str, Case]) -> None:
    configs = [config_of_case(case) for case in cases.values()]
    resolved = [load_config(config, nproc=world) for config in configs]
    counted = [fake_steps(config, on_cpu=True) for config in resolved]
    measured = measured_ranks(world, configs)
    problems = []
    for number, (name, steps) in enumerate(zip(cases, counted, strict=True)):
        predicted = predict_memory(resolved[number], on_cpu=True).ranks if name in PREDICTED else ()
        for step in steps:
            real, where = measured[step.rank][number], f"{name}, rank {step.rank}"
            if step.moved != real.moved:
                problems.append(f"{where}: {step.moved} counted without values, {real.moved} on real ranks")
            if step.stored != real.stored:
                problems.append(f"{where}: {step.stored} without values, {real.stored} on real ranks")
            ratio = step.peak / real.peak
            if not LEAST.get(name, 0.98) <= ratio <= 1.04:
                problems.append(f"{where}: peak {step.peak} without values, {real.peak} allocated, {ratio:.3f}")
            for memory in predicted[step.pipeline_rank :][:1]:
                problems += [f"{where}: {problem}" for problem in _missed(memory, real)]
    assert not problems, "\n".join(problems)


def _missed(memory: RankMemory, real: Measured) -> list[str]:
    """Stored bytes to the byte, peaks within 5 %."""
    stored, counted = memory.stored, vars(real.stored)
    ours = {"weights": stored.weights, "gradients": stored.gradients, "optimizer": stored.optimizer}
    problems = [f"{kind}: {ours[kind]} predicted, {counted[kind]} held" for kind in ours if ours[kind] != counted[kind]]
    ratio = memory.total / real.peak
    if not 0.95 <= ratio <= 1.05:
        problems.append(f"peak: {memory.total} predicted, {real.peak} allocated, {ratio:.3f}")
    return problems


def test_a_step_without_values_is_that_of_real_ranks() -> None:
    _compare(2, {name: TWO[name] for name in DEFAULT})


@pytest.mark.long
def test_more_steps_without_values() -> None:
    _compare(2, {name: case for name, case in TWO.items() if name not in DEFAULT})


@pytest.mark.long
def test_steps_of_four_ranks_without_values() -> None:
    _compare(4, FOUR)


@pytest.mark.long
def test_steps_of_eight_ranks_without_values() -> None:
    _compare(8, EIGHT)


def _of_thousands(layers: int, place: int, **plan: Any) -> RankStep:
    run = run_of(LLAMA_70B, layers=layers, microbatches=2, data=64, pipeline=8, tensor=TOKENS_SPLIT, **plan)
    config = load_config(run)
    (step,) = fake_steps(config, [place])
    assert step.rank == place * 512
    sent, tokens = step.moved["send", "pipeline"], 8192 // 8
    assert (sent.calls, sent.bytes) == (4, 4 * tokens * 8192 * 2)  # activations and gradients of two microbatches
    return step


def test_a_rank_of_thousands() -> None:
    """Of 70B widths, in a world of 4,096 ranks: no tensor has memory."""
    step = _of_thousands(8, 3)
    trained = step.stored.gradients // 4
    assert step.stored.weights == 4 * trained > 4e8
    assert 8 * trained < step.stored.optimizer < 8 * trained + 1000
    assert step.peak > step.stored.weights + step.stored.optimizer


@pytest.mark.long
def test_a_rank_of_thousands_in_full() -> None:
    step = _of_thousands(80, 3, zero=1)
    assert step.stored.weights > 2e9
    assert step.stored.gradients == pytest.approx(2 * step.stored.weights / 64, rel=0.05)  # of 4 bytes, weights of 2


@pytest.mark.long
def test_gradients_of_all_microbatches_are_added_in_the_buckets() -> None:
    """There is no second copy of them: a step of two microbatches needs the memory of one."""
    one, two = (
        fake_steps(load_config(run_of(LLAMA_8B, layers=1, microbatches=count, seq_len=512, data=8)))[0]
        for count in (1, 2)
    )
    assert two.peak - one.peak < two.stored.gradients / 100


@pytest.mark.long
def test_nothing_is_left_behind() -> None:
    gather = dist.all_gather_object
    fake_steps(load_config(config_of_case(CASES["zero_2_masters"]), nproc=2))
    gc.collect()
    assert not dist.is_initialized()
    assert dist.all_gather_object is gather
    assert not [thing for thing in gc.get_objects() if issubclass(type(thing), FakeTensor)]
    assert not isinstance(torch.ones(2), FakeTensor)


def test_what_has_no_step_is_named() -> None:
    gossip = load_config(config_of_case((dict(data=2, strategy=dict(type="sgp")), MB4)), nproc=2)
    with pytest.raises(ConfigError, match=r"'sgp'.*all_reduce, zero, hierarchical"):
        fake_steps(gossip)
    without = {key: value for key, value in config_of_case((dict(data=2), MB4)).items() if key != "data"}
    with pytest.raises(ConfigError, match="data: the config has none"):
        fake_steps(load_config(without, nproc=2))
