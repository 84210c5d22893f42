"""The list of plans against brute force: what the schema and `resolve_sizes` accept of every product of sizes."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from colossus.config import Config, ConfigError, as_dict, load_config
from colossus.context.grid import build_grid
from colossus.planner.candidates import Candidate, plans, representatives
from colossus.planner.fixed_keys import FixedKeys
from colossus.planner.model_layouts import layouts

GPT = dict(type="GPT", num_layers=4, hidden_size=64, num_heads=4, vocab_size=64, seq_len=32)
EXPERTS = dict(
    type="Llama", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, seq_len=32, experts=dict(num=4, top_k=2)
)
VIT = dict(type="ViT", num_layers=2, hidden_size=48, num_heads=3, image_size=8, patch_size=4, num_classes=10)

Key = tuple[Any, ...]


def every(config: Config, devices: int, keep: dict[str, Any] | None = None, hosts: int = 1) -> list[Candidate]:
    fixed = FixedKeys.of(config, keep)
    return [
        plan for layout in layouts(fixed, devices, hosts=hosts) for plan in plans(fixed, devices, layout, hosts=hosts)
    ]


def key_of(config: Config) -> Key:
    """What a plan is, however it is said."""
    parallel, schedule = config.parallel, config.schedule
    tensor, sequence, zero = parallel.tensor, parallel.sequence, parallel.zero
    grid = build_grid(parallel)
    has_scope = tensor.mode != "1d" or zero.stage == 3
    return (
        *grid.sizes.items(),
        tensor.mode if tensor.size > 1 else "1d",
        tensor.sequence_sharded and tensor.size > 1,
        tensor.weights if has_scope else None,
        sequence.mode if sequence.size > 1 else None,
        parallel.expert.size,
        zero.stage,
        (schedule.type, schedule.options.get("chunks"), schedule.microbatches),
        config.train.activation_checkpoint.type,
    )


def products(number: int, length: int) -> list[tuple[int, ...]]:
    return [each for each in itertools.product(range(1, number + 1), repeat=length) if math.prod(each) == number]


def tensors(size: int) -> list[dict[str, Any]]:
    """Sections of the described space, without scopes."""
    found = [dict(size=size, mode="1d", sequence_sharded=is_split) for is_split in {False, size > 1}]
    for mode, length in (("2d", 2), ("2.5d", 3), ("3d", 3)):
        for shape in products(size, length):
            plane = shape if mode == "3d" else shape[-2:]
            deep = mode == "2.5d" and not 1 < shape[0] <= min(plane)
            if min(plane) > 1 and max(plane) <= 2 * min(plane) and not deep:
                found.append(dict(size=size, mode=mode, shape=shape))
    return found


def sequences(size: int) -> list[dict[str, Any]]:
    if size == 1:
        return [dict(size=1)]
    hybrids = [dict(size=size, mode="hybrid", ulysses=n) for n in range(2, size) if size % n == 0]
    return [dict(size=size, mode="ring"), dict(size=size, mode="ulysses"), *hybrids]


def schedules(pipeline: int, blocks: int) -> list[dict[str, Any]]:
    if pipeline == 1:
        return [dict(type="1f1b")]
    chunks = [2**n for n in range(1, 10) if 2**n * pipeline <= blocks]
    found = [dict(type="1f1b"), dict(type="zb-h1"), *(dict(type="interleaved", chunks=each) for each in chunks)]
    return found + ([dict(type="zb-v")] if 2 * pipeline <= blocks else [])


def shards(data: int, inner: int, experts: int, per_host: int, has_half: bool) -> list[int | None]:
    even = [n for n in range(2, data + 1) if data % n == 0 and n % experts == 0]
    host = [n for n in even if n * inner <= per_host][-1:]
    half = [n for n in even if has_half and 2 * n == data and n * inner > per_host]
    return [None, *(n for n in (*host, *half) if n < data)]


def by_brute_force(values: dict[str, Any], devices: int, hosts: int, blocks: int, experts: int = 1) -> set[Key]:
    """Every plan of the described space that a config file can have."""
    found = set()
    for data, pipeline, sequence, size in products(devices, 4):
        for tensor, cut, stage, kind in itertools.product(
            tensors(size), sequences(sequence), range(4), schedules(pipeline, blocks)
        ):
            if pipeline > blocks or (stage and data * sequence == 1) or (sequence > 1 and tensor["mode"] != "1d"):
                continue
            scopes = ("matmul", "microbatch", "step") if stage == 3 or tensor["mode"] != "1d" else ("matmul",)
            for expert in range(1, experts + 1):
                factor = expert // sequence if expert % sequence == 0 else expert
                if experts % expert:
                    continue
                for shard in (
                    shards(data, sequence * size, factor, devices // hosts, pipeline == 1) if stage else [None]
                ):
                    parallel = dict(
                        data=data, pipeline=pipeline, sequence=cut, expert=expert, zero=dict(stage=stage, shard=shard)
                    )
                    for microbatches in (1, 2, 3, 4, 8):
                        given = {**values, "schedule": {**kind, "microbatches": microbatches}}
                        try:
                            resolved = load_config({**given, "parallel": {**parallel, "tensor": tensor}}, nproc=devices)
                        except ConfigError:
                            continue
                        for scope, again in itertools.product(scopes, ("none", "selective", "full")):
                            told = {**given, "parallel": {**parallel, "tensor": {**tensor, "weights": scope}}}
                            train = {**values["train"], "activation_checkpoint": again}
                            section = Config.model_validate({**told, "train": train})
                            plan = section.parallel.model_copy(
                                update={"data": data, "sequence": resolved.parallel.sequence}
                            )
                            found.add(key_of(section.model_copy(update={"parallel": plan})))
    return found


@pytest.mark.parametrize(
    ("model", "devices", "hosts", "batch", "blocks", "experts"),
    [
        pytest.param(GPT, 4, 2, 4, 6, 1, id="gpt"),
        pytest.param(GPT, 8, 2, 4, 6, 1, id="two hosts", marks=pytest.mark.long),
        pytest.param(EXPERTS, 4, 1, 2, 4, 4, id="experts", marks=pytest.mark.long),
        pytest.param(VIT, 6, 1, 3, 4, 1, id="vit", marks=pytest.mark.long),
    ],
)
def test_every_plan_that_fits_is_there_once(
    model: dict[str, Any], devices: int, hosts: int, batch: int, blocks: int, experts: int
) -> None:
    values = dict(model=model, train=dict(global_batch_size=batch))
    found = Counter(key_of(plan.config) for plan in every(load_config(values), devices, hosts=hosts))
    expected = by_brute_force(values, devices, hosts, blocks, experts)
    assert len(expected) > 100
    assert found.keys() == expected
    assert set(found.values()) == {1}


@pytest.mark.rest("parallel1", "parallel2")
@pytest.mark.parametrize(
    "parallel",
    [
        {},
        dict(data=2, tensor=dict(size=4, mode="2d", weights="step")),
        dict(sequence=dict(size=4, mode="hybrid", ulysses=2), zero=dict(stage=2, shard=1)),
        dict(pipeline=dict(size=2, split=[3, 3]), tensor=dict(size=2, sequence_sharded=True)),
    ],
)
def test_overrides_make_the_plan_of_any_file(parallel: dict[str, Any]) -> None:
    schedule = (
        dict(type="interleaved", chunks=3, microbatches=2) if "pipeline" not in parallel else dict(microbatches=4)
    )
    values: dict[str, Any] = dict(model=GPT, train=dict(global_batch_size=8, activation_checkpoint="full"))
    values |= dict(parallel=parallel, schedule=schedule)
    found = every(load_config(values), 8, hosts=2)
    assert len(found) > 1000
    for plan in found[:: len(found) // 100]:
        loaded = load_config(values, plan.overrides, 8)
        assert as_dict(loaded) == as_dict(plan.config), plan.overrides


def test_what_is_kept_stays() -> None:
    config = load_config(dict(model=GPT, train=dict(global_batch_size=8)))
    keep = dict(
        pipeline=2, tensor=dict(mode="2d"), schedule=dict(type="zb-h1"), train=dict(activation_checkpoint="full")
    )

    def is_kept(plan: Config) -> bool:
        parallel, again = plan.parallel, plan.train.activation_checkpoint.type
        return (parallel.pipeline.size, parallel.tensor.mode, plan.schedule.type, again) == (2, "2d", "zb-h1", "full")

    expected = {key_of(plan.config) for plan in every(config, 8) if is_kept(plan.config)}
    assert expected
    assert {key_of(plan.config) for plan in every(config, 8, keep=keep)} == expected


@pytest.mark.parametrize("keep", [{}, dict(zero=3, schedule=dict(type="zb-h1")), dict(pipeline=2)])
def test_layouts_are_ordered_by_plans_that_are_among_theirs(keep: dict[str, Any]) -> None:
    fixed = FixedKeys.of(load_config(dict(model=GPT, train=dict(global_batch_size=8))), keep)
    for layout in layouts(fixed, 8, hosts=2)[::7]:
        own = {key_of(plan.config) for plan in plans(fixed, 8, layout, hosts=2)}
        few = [key_of(plan) for plan in representatives(fixed, 8, layout, hosts=2)]
        assert set(few) <= own
        assert bool(few) == bool(own)


def test_a_wrong_keep_is_told_in_words() -> None:
    config = load_config(dict(model=GPT))
    with pytest.raises(ConfigError, match=r"parallel\.pipelin: no such key; did you mean parallel\.pipeline\?"):
        FixedKeys.of(config, dict(pipelin=2))
    with pytest.raises(ConfigError, match=r"parallel\.tensor\.size: must be at least 1, got 0"):
        FixedKeys.of(config, dict(tensor=0))


def test_a_strategy_of_the_file_has_its_own_say_on_zero() -> None:
    values = dict(model=GPT, parallel=dict(strategy="sgp"), train=dict(global_batch_size=8))
    assert {plan.config.parallel.zero.stage for plan in every(load_config(values), 4)} == {0}
    values["parallel"] = dict(strategy=dict(type="hierarchical", per_host=2), zero=1)
    found = every(load_config(values, nproc=4), 4)
    assert found
    assert {(plan.config.parallel.zero.stage, plan.config.parallel.zero.shard) for plan in found} == {(1, 2)}


def test_a_model_without_options_is_split_only_as_its_file_does() -> None:
    values: dict[str, Any] = dict(model=lambda: None, train=dict(global_batch_size=8))
    sizes = {plan.config.parallel.tensor.size for plan in every(load_config(values), 4)}
    assert sizes == {1}
    values["parallel"] = dict(tensor=2)
    assert {plan.config.parallel.tensor.size for plan in every(load_config(values), 4)} == {1, 2, 4}


def test_nothing_of_it_loads_torch() -> None:
    code = "import sys, colossus.planner.candidates; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
