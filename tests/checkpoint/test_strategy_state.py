"""Strategies that average in rounds or compress sums: stopped in the midst and gone on with, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.long import long
from helpers.ranks import run_ranks
from helpers.resumed import engine_of, settings
from torch import Tensor, nn

from colossus.checkpoint.folder import name_of

STEPS, HALF = 6, 3
POWER: dict[str, Any] = dict(compress="powersgd", start_step=1, min_compression_rate=0.0)
#: by number of ranks: plan, strategy
STRATEGIES: dict[int, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    2: {
        "local_sgd": (dict(data=2), dict(type="local_sgd", period=4)),
        "slowmo": (dict(data=2), dict(type="slowmo", period=5)),
        "diloco": (dict(data=2), dict(type="diloco", period=2)),
        "bf16": (dict(data=2), dict(type="all_reduce", compress="bf16")),
        "powersgd": (dict(data=2), dict(type="all_reduce", **POWER)),
    },
    4: {
        "diloco": (dict(data=2, tensor=2), dict(type="diloco", period=2)),
        "powersgd": (dict(data=2, tensor=2), dict(type="all_reduce", **POWER)),
        "bf16 between hosts": (dict(data=4), dict(type="hierarchical", compress="bf16", hosts=2)),
        "powersgd between hosts": (dict(data=4), dict(type="hierarchical", per_host=2, **POWER)),
    },
}


def _through_and_in_two(rank: int, world: int, folder: Path) -> dict[str, tuple[Any, Any]]:
    """Of each strategy, what a run through and one that goes on in a new engine have seen and end with."""
    found = {}
    for name, (parallel, strategy) in STRATEGIES[world].items():
        config = settings(folder / name, {**parallel, "strategy": strategy}, train=dict(steps=STEPS))
        engine = engine_of(config)
        engine.loss_fn = _uneven
        losses = []
        for step in range(STEPS):
            if step == HALF:
                engine.checkpoints.save().wait()
            losses.append(engine.train_step(next(engine.loader)).loss)
        through = losses[HALF:], _weights(engine)
        engine.close()
        engine = engine_of(config)
        engine.loss_fn = _uneven
        engine.checkpoints.load(folder / name / name_of(HALF))
        losses = [engine.train_step(next(engine.loader)).loss for _ in range(HALF, STEPS)]
        found[name] = through, (losses, _weights(engine))
        engine.close()
    return found


def _uneven(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Replicas train on other numbers of tokens: a sum that comes back wrong is seen."""
    counted = batch["labels"] > 1
    return (nn.functional.cross_entropy(outputs, batch["labels"], reduction="none") * counted).sum(), counted.sum()


def _weights(engine: Any) -> Tensor:
    return torch.cat([param.detach().flatten() for param in engine.model.parameters()])


@pytest.mark.parametrize("world", [2, *long(4)])
def test_a_run_goes_on_bit_for_bit(world: int, tmp_path: Path) -> None:
    for found in run_ranks(world, _through_and_in_two, world, tmp_path, with_context=False):
        assert len(found) == len(STRATEGIES[world])
        for name, ((losses, weights), (again, weights_again)) in found.items():
            assert losses == again, name
            assert torch.equal(weights, weights_again), name
