"""Collectives of weights, gradients and a step's numbers as they are composed, beside what real ranks count."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.layouts import resolved_with_layout
from helpers.ranks import run_ranks
from helpers.training import SIZES, batch_of, config_of
from torch import Tensor

import colossus
from colossus.comm import accounting, collectives
from colossus.context.groups import AxisGroup
from colossus.planner.gradient_traffic import plan_rank
from colossus.planner.plan_stages import stages_of

#: whose collectives are composed; layers have others
OWN = ("data_parallel/", "gradients/", "engine/optimizer_step.py", "engine/routers.py", "optim/")
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
        if any(file.startswith(OWN) for file in inside):
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


def _composed(config: dict[str, Any], world: int) -> list[Counts]:
    """Of each pipeline rank."""
    resolved, profile = resolved_with_layout(config, world)
    found = []
    for stages in stages_of(resolved, profile):
        traffic = plan_rank(profile.facts, resolved, stages, on_cpu=True).traffic_with(profile.optimizer)
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
    "zero_2": (dict(data=2, zero=2), BF16),
    "zero_3": (dict(data=2, zero=3), MB2),
    "pipeline_tied": (dict(pipeline=2), MB4),
    "1d": (dict(tensor=dict(size=2, sequence_sharded=True)), {}),
    "expert": (dict(data=2, expert=2), MOE),
}
MORE: dict[str, Case] = {
    "zero_1": (dict(data=2, zero=1), MB2),
    "zero_1_masters": (dict(data=2, zero=1), BF16_MASTERS),
    "masters": (dict(data=2), BF16_MASTERS),
    "zero_3_microbatch": (dict(data=2, zero=3, tensor=dict(weights="microbatch")), MB2),
    "zero_3_step": (dict(data=2, zero=3, tensor=dict(weights="step")), MB2),
    "zero_3_checkpointed": (dict(data=2, zero=3), dict(train=dict(activation_checkpoint="full"))),
    "sequence": (dict(sequence=2), MB2),
    "sequence_zero_3": (dict(sequence=dict(size=2, mode="ulysses"), zero=3), {}),
    "zero_1_expert": (dict(data=2, expert=2, zero=1), MOE),
    "whole": (dict(data=2, zero=1), dict(optimizer=dict(type="Adam", whole=True, weight_decay=0.0))),
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
    "zb_h1_zero_3_microbatch": (
        dict(data=2, pipeline=2, zero=3, tensor=dict(weights="microbatch")),
        dict(schedule=dict(type="zb-h1", microbatches=4)),
    ),
    "1f1b_zero_3_microbatch": (dict(data=2, pipeline=2, zero=3, tensor=dict(weights="microbatch")), MB4),
    "sequence_data_zero_1": (dict(data=2, sequence=2, zero=1), MB2),
    "expert_zero_1": (dict(data=4, expert=2, zero=1), MOE),
    "expert_hsdp": (dict(data=4, expert=2, zero=dict(stage=1, shard=2)), MOE),
    "data_pipeline_tied": (dict(data=2, pipeline=2), {**MB4, **SMALL}),
    "pipeline_llama": (dict(pipeline=2, tensor=2), dict(model=dict(type="Llama", **SIZES), **MB2)),
}


#: of whole parameters
OPTIMIZERS: dict[str, Case] = {
    "muon": (dict(data=2, zero=1), dict(optimizer=dict(type="Muon", lr=1e-3, weight_decay=0.0))),
    "lamb": (dict(data=2, zero=3), dict(optimizer=dict(type="LAMB", lr=1e-3, weight_decay=0.0))),
    "adafactor": (dict(tensor=2), dict(optimizer=dict(type="Adafactor", lr=1e-3, weight_decay=0.0))),
    "muon_pipeline": (dict(pipeline=2), dict(optimizer=dict(type="Muon", lr=1e-3, weight_decay=0.0), **MB2)),
}


def _compare(world: int, cases: dict[str, Case], *, ranks: int | None = None) -> None:
    """On all ranks, or the first ``ranks``."""
    configs = {name: config_of(plan, 4, **{"precision": "fp32", **_rest(more)}) for name, (plan, more) in cases.items()}
    composed = {name: _composed(config, world) for name, config in configs.items()}
    counted = run_ranks(world, lambda rank: [_counted(rank, config) for config in configs.values()], with_context=False)
    problems = []
    for number, (name, of_ranks) in enumerate(composed.items()):
        for rank, of_rank in enumerate(counted[:ranks]):
            ours, real = of_ranks[rank * len(of_ranks) // world], of_rank[number]
            problems += [
                f"{name} rank {rank} {key}: {ours.get(key)} composed, {real.get(key)} counted"
                for key in sorted({*ours, *real})
                if ours.get(key) != pytest.approx(real.get(key))
            ]
    assert not problems, "\n".join(problems)


def _backward_of(config: dict[str, Any]) -> list[str]:
    """What happens in the second step: "block 3" where the backward of that block is over, and what is started."""
    engine = colossus.initialize(config)
    happened: list[str] = []
    modules, chain = dict(engine.model.named_modules()), engine.pipeline.chain(engine.model)
    assert chain is not None
    for number, block in enumerate(chain):
        if block.name.startswith("blocks."):
            hook = partial(lambda number, *_: happened.append(f"block {number}"), number)
            modules[block.name].register_full_backward_hook(hook)

    def record(operation: str, x: Tensor, group: AxisGroup, **_: Any) -> None:
        if x.dtype != torch.float64:
            happened.append(f"{operation} of {x.nbytes}")

    part = config["train"]["global_batch_size"] // engine.context.size("data")
    for step in range(2):
        batch = {key: x[:part] for key, x in batch_of(step, config["model"]).items()}
        with patch.object(collectives, "record", record if step else collectives.record):
            happened.clear()
            engine.train_step(batch)
    engine.close()
    return happened


def _rest(more: dict[str, Any]) -> dict[str, Any]:
    train = dict(more.get("train", {}))
    precision = train.pop("precision", "fp32")
    return {**more, "train": train, "precision": precision}


def test_traffic_is_what_ranks_count() -> None:
    _compare(2, TWO)


def test_traffic_on_four_ranks() -> None:
    _compare(4, FOUR)


def test_reductions_start_with_their_blocks() -> None:
    plans: list[dict[str, Any]] = [dict(data=2), dict(data=2, zero=1), dict(data=2, zero=3)]
    configs = [config_of(plan, 4, "fp32", model=dict(num_layers=3), **SMALL) for plan in plans]
    happened, _ = run_ranks(2, lambda rank: [_backward_of(config) for config in configs], with_context=False)
    for config, of_plan in zip(configs, happened, strict=True):
        resolved, profile = resolved_with_layout(config, 2)
        (stages,) = stages_of(resolved, profile)
        reductions = plan_rank(profile.facts, resolved, stages, on_cpu=True).traffic.reductions
        composed = []
        for block in (*reversed(range(len(profile.facts.blocks))), None):
            for when in ("last", "each"):
                started = [one.collectives for one in reductions if (one.block, one.when) == (block, when)]
                composed += [f"{each.operation} of {each.input_bytes}" for several in started for each in several]
                if when == "last" and block is not None and profile.facts.blocks[block].startswith("blocks."):
                    composed.append(f"block {block}")
        assert composed == [what for what in of_plan if not what.startswith("all_gather")]


def test_traffic_of_optimizers() -> None:
    """The first rank's: what ranks own differs."""
    _compare(2, OPTIMIZERS, ranks=1)


@pytest.mark.long
def test_traffic_of_more_plans() -> None:
    _compare(2, MORE)


@pytest.mark.long
def test_traffic_of_more_plans_on_four_ranks() -> None:
    _compare(4, MORE_FOUR)
