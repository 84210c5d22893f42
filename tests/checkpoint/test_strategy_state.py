"""Strategies that average in rounds or compress sums: stopped in the midst and gone on with, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.resumed import engine_of, settings
from torch import Tensor, nn

from colossus.checkpoint.folder import name_of

STEPS, HALF = 8, 3
POWER: dict[str, Any] = dict(compress="powersgd", start_step=1, min_compression_rate=0.0)
#: ranks, plan, strategy
STRATEGIES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "local_sgd": (2, dict(data=2), dict(type="local_sgd", period=4)),
    "post-local": (2, dict(data=2), dict(type="local_sgd", period=2, post_local=4)),
    "slowmo": (2, dict(data=2), dict(type="slowmo", period=2, slow_momentum=0.7)),
    "slowmo average": (2, dict(data=2), dict(type="slowmo", period=5, buffers="average")),
    "bf16": (2, dict(data=2), dict(type="all_reduce", compress="bf16")),
    "diloco": (4, dict(data=2, tensor=2), dict(type="diloco", period=2)),
    "powersgd": (4, dict(data=2, tensor=2), dict(type="all_reduce", **POWER)),
    "fp16 between hosts": (4, dict(data=4), dict(type="hierarchical", compress="fp16", hosts=2)),
    "powersgd between hosts": (4, dict(data=4), dict(type="hierarchical", per_host=2, **POWER)),
}


def _through_and_in_two(rank: int, folder: Path) -> dict[str, tuple[Any, Any]]:
    """Of each strategy, what a run through and one that goes on in a new engine have seen and end with."""
    found = {}
    world = 2 if (folder / "two").exists() else 4
    for name, (ranks, parallel, strategy) in STRATEGIES.items():
        if ranks != world:
            continue
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


@pytest.mark.parametrize("world", [2, 4])
def test_a_run_goes_on_bit_for_bit(world: int, tmp_path: Path) -> None:
    if world == 2:
        (tmp_path / "two").touch()
    for found in run_ranks(world, _through_and_in_two, tmp_path, with_context=False):
        assert len(found) >= 4
        for name, ((losses, weights), (again, weights_again)) in found.items():
            assert losses == again, name
            assert torch.equal(weights, weights_again), name
