"""The strategy that docs/own-strategy.md shows does what it says, against a dense simulation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus

DOCS = Path(__file__).parents[2] / "docs" / "own-strategy.md"
REPLICAS, STEPS, SAMPLES, WEIGHT, LR = 4, 7, 6, 0.3, 0.05


def shown() -> str:
    """The code block of the page."""
    section = DOCS.read_text().split("## Example")[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


def net() -> nn.Module:
    return nn.Linear(5, 3, dtype=torch.float64)


def batch(replica: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * replica + step)
    return torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)


def loss_fn(y: Tensor, x: Any) -> tuple[Tensor, int]:
    return y.square().sum(), SAMPLES


def _run(rank: int, plan: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters of a replica before and after the run."""
    exec(shown(), {})
    config = dict(
        parallel=dict(**plan, strategy=dict(type="late_neighbour", weight=WEIGHT)),
        optimizer=dict(type="SGD", lr=LR),
        train=dict(steps=STEPS, global_batch_size=SAMPLES * REPLICAS, precision="fp64"),
    )
    engine = colossus.initialize(config, model=net, loss_fn=loss_fn)
    first = [param.detach().clone() for param in engine.model.parameters()]
    for step in range(STEPS):
        engine.train_step(batch(engine.context.index("data"), step))
    last = [param.detach().clone() for param in engine.model.parameters()]
    engine.close()
    return first, last


def test_the_strategy_of_the_page_is_its_recurrence() -> None:
    found = run_ranks(REPLICAS, _run, dict(data=REPLICAS), with_context=False)
    models = [net() for _ in range(REPLICAS)]
    for model in models:
        for param, first in zip(model.parameters(), found[0][0], strict=True):
            param.data.copy_(first)
    before: list[list[Tensor]] = []
    for step in range(STEPS):
        for replica, model in enumerate(models):
            model.zero_grad()
            loss_fn(model(batch(replica, step)), None)[0].div(SAMPLES).backward()
            with torch.no_grad():
                for param in model.parameters():
                    param -= LR * param.grad
        sent = [[param.detach().clone() for param in model.parameters()] for model in models]
        if step:
            hop = 1 + (step - 1) % (REPLICAS - 1)
            with torch.no_grad():
                for replica, model in enumerate(models):
                    for param, theirs in zip(model.parameters(), before[(replica - hop) % REPLICAS], strict=True):
                        param.lerp_(theirs, WEIGHT)
        before = sent
    for model, (_, params) in zip(models, found, strict=True):
        for expected, param in zip(model.parameters(), params, strict=True):
            torch.testing.assert_close(param, expected.detach(), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(found[0][1][0], found[1][1][0], atol=1e-3)
