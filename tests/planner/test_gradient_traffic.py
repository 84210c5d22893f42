"""Collectives of weights, gradients and a step's numbers as they are composed, beside what real ranks count."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from helpers.ranks import run_ranks
from helpers.training import SIZES, batch_of, config_of
from torch import Tensor

import colossus
from colossus.comm import accounting, collectives
from colossus.config import load_config
from colossus.context.groups import AxisGroup
from colossus.planner.fake_rank import fake_rank
from colossus.planner.gradient_traffic import gradient_traffic
from colossus.planner.memory import layout_facts, stages_of
from colossus.planner.parameter_facts import ModelFacts

#: whose collectives are composed; layers, and optimizers of whole parameters, have others
OWN = ("data_parallel/", "gradients/", "engine/optimizer_step.py", "engine/routers.py")
ROOT = str(Path(colossus.__file__).parent)

Counts = dict[tuple[str, str, str], tuple[int, float]]


class OwnCollectives:
    """What is started by code of `OWN`, by (operation, axes, dtype): calls and bytes sent."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.bytes: Counter[tuple[str, str, str]] = Counter()

    def record(self, operation: str, x: Tensor, group: AxisGroup, *, what: str = "", sent: float | None = None) -> None:
        frame, files = sys._getframe(1), []
        while frame is not None:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back  # type: ignore[assignment]
        inside = [file.removeprefix(f"{ROOT}/") for file in files if file.startswith(ROOT)]
        if any(file.startswith(OWN) for file in inside) and not any(file.startswith("optim/") for file in inside):
            key = f"{operation} {what}" if what else operation, str(group), str(x.dtype).removeprefix("torch.")
            self.counts[key] += 1
            self.bytes[key] += accounting.sent(operation, group.size, x.nbytes) if sent is None else sent

    @property
    def found(self) -> Counts:
        return {key: (self.counts[key], self.bytes[key]) for key in self.counts}


def _counted(rank: int, config: dict[str, Any]) -> Counts:
    """In the second step."""
    engine = colossus.initialize(config)
    data, whole = engine.context.size("data"), config["train"]["global_batch_size"]
    part, index = whole // data, engine.context.index("data")
    own = OwnCollectives()
    for step in range(2):
        batch = {key: x[index * part :][:part] for key, x in batch_of(step, config["model"], whole).items()}
        if not step:
            engine.train_step(batch)
            continue
        with patch.object(collectives, "record", own.record):
            engine.train_step(batch)
    engine.close()
    return own.found


def _facts(config: dict[str, Any], layout: dict[str, Any], data: int) -> ModelFacts:
    """Of a layout, in a world without other data ranks than experts need, and without pipeline or ZeRO."""
    train = {**config["train"], "global_batch_size": config["train"]["global_batch_size"] // data}
    train["global_batch_size"] *= layout.get("data", 1)
    schedule = {"microbatches": config.get("schedule", {}).get("microbatches", 1)}
    made = {**config, "parallel": layout, "train": train, "schedule": schedule}
    resolved = load_config(made, nproc=_world(layout))
    batch = batch_of(0, config["model"], config["train"]["global_batch_size"] // data)
    with fake_rank(resolved) as context:
        return layout_facts(resolved, context, batch).model


def _world(plan: dict[str, Any]) -> int:
    def size(key: str) -> int:
        section = plan.get(key, 1)
        return int(section.get("size", 1) if isinstance(section, dict) else section)

    return size("data") * size("pipeline") * size("tensor") * size("sequence")


def _composed(config: dict[str, Any], model: ModelFacts, world: int) -> list[Counts]:
    """Of each pipeline rank."""
    resolved = load_config(config, nproc=world)
    found = []
    for stages in stages_of(resolved, model):
        traffic = gradient_traffic(model, resolved, stages, on_cpu=True)
        counts: dict[tuple[str, str, str], tuple[int, float]] = {}
        for collective, times in traffic.counts(stages).items():
            key = collective.operation, collective.axes, collective.dtype
            calls, sent = counts.get(key, (0, 0.0))
            counts[key] = calls + times, sent + collective.sent * times
        found.append(counts)
    return found


Case = tuple[dict[str, Any], dict[str, Any]]
MB2, MB4 = dict(schedule=dict(microbatches=2)), dict(schedule=dict(microbatches=4))
#: in several buckets
SMALL = dict(comm=dict(bucket_mb=0.01))
BF16, BF16_MASTERS = (dict(train=dict(precision=precision)) for precision in ("bf16", dict(params="bf16")))
MOE = dict(model=dict(type="Llama", **SIZES, experts=dict(num=4, top_k=2)))
TWO: dict[str, Case] = {
    "data": (dict(data=2), SMALL),
    "zero_1": (dict(data=2, zero=1), MB2),
    "zero_2": (dict(data=2, zero=2), BF16),
    "zero_3": (dict(data=2, zero=3), MB2),
    "pipeline_tied": (dict(pipeline=2), MB4),
    "1d": (dict(tensor=dict(size=2, sequence_sharded=True)), {}),
    "expert": (dict(data=2, expert=2), MOE),
}
MORE: dict[str, Case] = {
    "zero_1_masters": (dict(data=2, zero=1), BF16_MASTERS),
    "masters": (dict(data=2), BF16_MASTERS),
    "zero_3_microbatch": (dict(data=2, zero=3, tensor=dict(weights="microbatch")), MB2),
    "zero_3_step": (dict(data=2, zero=3, tensor=dict(weights="step")), MB2),
    "zero_3_checkpointed": (dict(data=2, zero=3), dict(train=dict(activation_checkpoint="full"))),
    "sequence": (dict(sequence=2), MB2),
    "sequence_zero_3": (dict(sequence=dict(size=2, mode="ulysses"), zero=3), {}),
    "zero_1_expert": (dict(data=2, expert=2, zero=1), MOE),
    "frozen": (dict(data=2, zero=3), dict(optimizer=dict(groups=[dict(match="*embedding*", frozen=True)]))),
}
FOUR: dict[str, Case] = {
    "data_1d": (dict(data=2, tensor=2), SMALL),
    "hsdp": (dict(data=4, zero=dict(stage=3, shard=2)), MB2),
    "pipeline_zero_1": (dict(data=2, pipeline=2, zero=1), MB4),
}
MORE_FOUR: dict[str, Case] = {
    "2d": (dict(tensor=dict(mode="2d", size=4)), MB2),
    "2.5d": (dict(tensor=dict(mode="2.5d", size=4, depth=1)), {}),
    "1d_zero_3": (dict(data=2, tensor=2, zero=3), MB2),
    "hierarchical": (dict(data=4, strategy=dict(type="hierarchical", hosts=2)), SMALL),
    "interleaved_zero_3": (
        dict(data=2, pipeline=2, zero=3),
        dict(model=dict(num_layers=4), schedule=dict(type="interleaved", microbatches=4, chunks=2)),
    ),
    "zb_h1_zero_3": (dict(data=2, pipeline=2, zero=3), dict(schedule=dict(type="zb-h1", microbatches=4))),
    "1f1b_zero_3_microbatch": (dict(data=2, pipeline=2, zero=3, tensor=dict(weights="microbatch")), MB4),
    "sequence_data_zero_1": (dict(data=2, sequence=2, zero=1), MB2),
    "expert_zero_1": (dict(data=4, expert=2, zero=1), MOE),
    "expert_hsdp": (dict(data=4, expert=2, zero=dict(stage=1, shard=2)), MOE),
    "data_pipeline_tied": (dict(data=2, pipeline=2), {**MB4, **SMALL}),
    "pipeline_llama": (dict(pipeline=2, tensor=2), dict(model=dict(type="Llama", **SIZES), **MB2)),
}


def _compare(world: int, cases: dict[str, Case]) -> None:
    configs = {name: config_of(plan, 4, **{"precision": "fp32", **_rest(more)}) for name, (plan, more) in cases.items()}
    composed = {}
    for name, (plan, _) in cases.items():
        layout = {key: value for key, value in plan.items() if key in ("tensor", "sequence", "expert")}
        if "expert" in plan:
            layout["data"] = plan["expert"]
        model = _facts(configs[name], layout, plan.get("data", 1))
        composed[name] = _composed(configs[name], model, world)
    counted = run_ranks(world, lambda rank: [_counted(rank, config) for config in configs.values()], with_context=False)
    problems = []
    for number, (name, of_ranks) in enumerate(composed.items()):
        for rank, of_rank in enumerate(counted):
            ours, real = of_ranks[rank * len(of_ranks) // world], of_rank[number]
            problems += [
                f"{name} rank {rank} {key}: {ours.get(key)} composed, {real.get(key)} counted"
                for key in sorted({*ours, *real})
                if ours.get(key) != pytest.approx(real.get(key))
            ]
    assert not problems, "\n".join(problems)


def _rest(more: dict[str, Any]) -> dict[str, Any]:
    train = dict(more.get("train", {}))
    precision = train.pop("precision", "fp32")
    return {**more, "train": train, "precision": precision}


def test_traffic_is_what_ranks_count() -> None:
    _compare(2, TWO)


def test_traffic_on_four_ranks() -> None:
    _compare(4, FOUR)


@pytest.mark.long
def test_traffic_of_more_plans() -> None:
    _compare(2, MORE)


@pytest.mark.long
def test_traffic_of_more_plans_on_four_ranks() -> None:
    _compare(4, MORE_FOUR)
