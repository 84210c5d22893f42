"""Rounds and compressed sums where they are met by what is rare: one replica, low precision, gradients that are not
finite, frozen and unused parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.long import long
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus

STRATEGIES: dict[str, dict[str, Any]] = {
    "local_sgd": dict(type="local_sgd", period=2),
    "slowmo": dict(type="slowmo", period=2),
    "diloco": dict(type="diloco", period=2),
    "hierarchical": dict(type="hierarchical"),
    "bf16": dict(type="all_reduce", compress="bf16"),
    "powersgd": dict(type="all_reduce", compress="powersgd", start_step=0, min_compression_rate=0.0),
}
STEPS = 4


class Net(nn.Module):
    """With a frozen parameter, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.unused, self.frozen = nn.Linear(3, 5), nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + self.frozen
        return x


def _loss(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(outputs, batch["labels"], reduction="sum"), len(outputs)


def _batch(step: int, rank: int, damaged: tuple[int, int] | None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    inputs = torch.randn(4, 6, generator=generator)
    if damaged == (step, rank):
        inputs[0, 0] = torch.nan
    return {"inputs": inputs, "labels": torch.randint(0, 6, (4,), generator=generator)}


def _run(
    rank: int, world: int, precision: Any, damaged: tuple[int, int] | None
) -> dict[str, tuple[list[bool], Tensor, bool]]:
    """Of each strategy: which steps this rank skipped, its parameters, and whether an unused one is as it was."""
    found = {}
    for name, strategy in STRATEGIES.items():
        engine = colossus.initialize(
            dict(
                parallel=dict(data=world, strategy=strategy),
                train=dict(steps=STEPS, global_batch_size=4 * world, precision=precision, seed=1, on_nonfinite="skip"),
                optimizer=dict(type="AdamW", lr=0.01, weight_decay=0.1),
                device="cpu",
            ),
            model=Net,
            loss_fn=_loss,
        )
        before = engine.model.unused.weight.detach().clone()
        skipped = [bool(engine.train_step(_batch(step, rank, damaged)).skipped) for step in range(STEPS)]
        params = torch.cat([param.detach().flatten().float() for param in engine.model.parameters()])
        found[name] = skipped, params, torch.allclose(engine.model.unused.weight, before, atol=1e-6)
        engine.close()
    return found


def test_one_replica_is_one_process() -> None:
    (found,) = run_ranks(1, _run, 1, "fp32", None, with_context=False)
    params = [params for _, params, _ in found.values()]
    exact = ("local_sgd", "hierarchical", "bf16", "powersgd")
    for name in exact:
        assert torch.equal(found[name][1], found["local_sgd"][1]), name
    assert all(each.isfinite().all() for each in params)


@pytest.mark.parametrize("precision", ["fp16", *long("fp32", "bf16")])
def test_a_replica_that_leaves_a_step_out(precision: str) -> None:
    """An exact step is left out by all, one of a replica's own by this one; averages go on, and stay finite."""
    first, second = run_ranks(2, _run, 2, precision, (1, 1), with_context=False)
    for name in STRATEGIES:
        (skipped, params, is_kept), (also_skipped, others, _) = first[name], second[name]
        assert params.isfinite().all(), name
        assert others.isfinite().all(), name
        assert is_kept, name
        own = name not in ("hierarchical", "bf16", "powersgd")
        assert skipped[1] is not own, name
        assert also_skipped[1] is True, name
        # step 4 ends a round, and is exact in the rest
        assert (params - others).abs().max() < 1e-6 or name == "diloco", name
