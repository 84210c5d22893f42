"""Every data-parallel strategy, by itself and with its variants, lowers the loss on data it has not seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.training import config_of
from torch import Tensor

import colossus

REPLICAS, STEPS, PERIOD = 4, 30, 7
SIZES: dict[str, Any] = dict(num_layers=1, hidden_size=24, num_heads=2, vocab_size=17, seq_len=16)
#: nats by which the validation loss falls at least; it begins at ln 17 = 2.83, and the token before says all
LEAST_FALL = 2.5
STRATEGIES: dict[str, dict[str, Any]] = {
    "all_reduce": dict(type="all_reduce"),
    "all_reduce bf16": dict(type="all_reduce", compress="bf16"),
    "all_reduce fp16": dict(type="all_reduce", compress="fp16"),
    "all_reduce powersgd": dict(type="all_reduce", compress="powersgd", rank=4, start_step=3),
    "hierarchical": dict(type="hierarchical", hosts=2),
    "sgp": dict(type="sgp"),
    "sgp overlap 1": dict(type="sgp", overlap=1),
    "d-psgd": dict(type="d-psgd", graph="ring"),
    "ad-psgd": dict(type="ad-psgd"),
    "local_sgd": dict(type="local_sgd", period=PERIOD),
    "slowmo": dict(type="slowmo", period=PERIOD),
    "diloco": dict(type="diloco", period=PERIOD),
}


def _batch(step: int) -> dict[str, Tensor]:
    """Sequences in which each token is the one before plus 3, from a random beginning."""
    start = torch.randint(0, 17, (16, 1), generator=torch.Generator().manual_seed(step))
    ids = (start + 3 * torch.arange(17)) % 17
    return {"inputs": ids[:, :-1], "labels": ids[:, 1:]}


def _losses(rank: int) -> dict[str, tuple[float, float]]:
    """Of each strategy the validation loss before and after training."""
    found = {}
    for name, strategy in STRATEGIES.items():
        config = config_of(
            dict(data=REPLICAS, strategy=strategy),
            STEPS,
            "fp32",
            model=dict(type="GPT", **SIZES),
            optimizer=dict(lr=2e-2, weight_decay=0.0),
            lr_schedule=dict(warmup_steps=3),
            train=dict(global_batch_size=16),
        )
        engine = colossus.initialize(config)
        mine = slice(4 * rank, 4 * rank + 4)
        unseen = {key: value[mine] for key, value in _batch(10_000).items()}
        before = engine.eval_step(unseen).loss
        for step in range(STEPS):
            engine.train_step({key: value[mine] for key, value in _batch(step).items()})
        found[name] = before, engine.eval_step(unseen).loss
        engine.close()
    return found


@pytest.mark.long
def test_the_loss_falls_under_every_strategy() -> None:
    by_rank = run_ranks(REPLICAS, _losses, with_context=False)
    assert all(losses == by_rank[0] for losses in by_rank), "an evaluation is of all replicas"
    for name, (before, after) in by_rank[0].items():
        assert after < before - LEAST_FALL, f"{name}: {before:.3f} -> {after:.3f}"
