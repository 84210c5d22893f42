"""When a rank's reductions start, as they are predicted and as they happen; `test_plan_check` compares their bytes."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from helpers.layouts import resolved_with_layout
from helpers.ranks import run_ranks
from helpers.training import batch_of, config_of
from torch import Tensor

import colossus
from colossus.comm import collectives
from colossus.context.groups import AxisGroup
from colossus.planner.plan_rank import PlanRank
from colossus.planner.plan_stages import stages_of


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


def test_reductions_start_with_their_blocks() -> None:
    plans: list[dict[str, Any]] = [dict(data=2), dict(data=2, zero=1), dict(data=2, zero=3)]
    configs = [config_of(plan, 4, "fp32", model=dict(num_layers=3), comm=dict(bucket_mb=0.01)) for plan in plans]
    happened, _ = run_ranks(2, lambda rank: [_backward_of(config) for config in configs], with_context=False)
    for config, of_plan in zip(configs, happened, strict=True):
        resolved, profile = resolved_with_layout(config, 2)
        (stages,) = stages_of(resolved, profile.facts)
        reductions = PlanRank(profile.facts, resolved, stages, on_cpu=True).reductions
        composed = []
        for block in (*reversed(range(len(profile.facts.blocks))), None):
            for when in ("last", "each"):
                started = [one.collectives for one in reductions if (one.block, one.when) == (block, when)]
                composed += [f"{own.operation} of {own.input_bytes}" for several in started for own in several]
                if when == "last" and block is not None and profile.facts.blocks[block].startswith("blocks."):
                    composed.append(f"block {block}")
        assert composed == [line for line in of_plan if not line.startswith("all_gather")]
