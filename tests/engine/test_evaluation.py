"""Evaluation: its own batch size, and every sample of the validation data once, under every plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from torch.utils.data import DataLoader, Dataset, IterableDataset

import colossus
from colossus.engine.engine import Engine

SIZES: dict[str, Any] = dict(num_layers=2, hidden_size=24, num_heads=4, vocab_size=53, seq_len=12)
SAMPLES = 17


class Samples(Dataset[Any]):
    """Samples with different numbers of valid tokens."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(0, 53, (13,), generator=torch.Generator().manual_seed(index))
        labels = ids[1:].clone()
        labels[: index % 5] = -100
        return {"inputs": ids[:-1], "labels": labels}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return map(Samples().__getitem__, range(SAMPLES))


def collate(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate(samples)


#: kind of validation data -> what makes it
KINDS: dict[str, Any] = {
    "dataset": lambda: {"type": Samples},
    "workers": lambda: {"type": Samples, "num_workers": 1, "collate_fn": collate},
    "stream": lambda: {"type": Stream},
    "loader": lambda: {"type": lambda: DataLoader(Samples(), batch_size=12)},
}
TOKENS = sum(12 - index % 5 for index in range(SAMPLES))


def engine_of(parallel: dict[str, Any], microbatches: int, kind: str, **train: Any) -> Engine:
    settings: dict[str, Any] = dict(
        parallel=parallel,
        schedule=dict(microbatches=microbatches),
        model=dict(type="GPT", **SIZES),
        data={"type": Samples, "count": 24, "validation": KINDS[kind]()},
        train=dict(global_batch_size=24, precision="fp64", seed=3, **train),
        comm=dict(timeout_seconds=20.0),
        device="cpu",
    )
    return colossus.initialize(settings)


def _evaluated(rank: int, parallel: dict[str, Any], microbatches: int, kinds: list[str]) -> list[tuple[float, int]]:
    found = []
    for kind in kinds:
        engine = engine_of(parallel, microbatches, kind, eval_batch_size=12)
        for _ in range(2):  # the same samples again
            summary = engine.evaluate()
            found.append((summary.loss, summary.tokens))
        sums = [engine.eval_step(batch) for batch in engine.eval_loader]  # a loop of one's own
        found.append((sum(each.loss_sum for each in sums) / sum(each.count for each in sums), summary.tokens))
        engine.close()
    return found


#: 17 samples in batches of 12 and 5, the latter over data ranks and the ranks that split a batch
PLANS: dict[str, tuple[int, dict[str, Any], int]] = {
    "data3": (3, dict(data=3), 1),
    "pipeline": (4, dict(data=2, pipeline=2), 3),
    "2d": (4, dict(tensor=dict(mode="2d", shape=(4, 1))), 1),  # rows are 4 parts of a batch: 4 + 1 samples
    "sequence": (4, dict(data=2, sequence=2), 1),
}


@pytest.fixture(scope="module")
def alone() -> float:
    ((loss, tokens), *_) = run_ranks(1, _evaluated, {}, 1, ["dataset"], with_context=False)[0]
    assert tokens == TOKENS
    return float(loss)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.rest("2d", "sequence")
def test_every_plan_evaluates_every_sample_once(name: str, alone: float) -> None:
    world, parallel, microbatches = PLANS[name]
    kinds = list(KINDS) if name == "data3" else ["dataset"]
    for found in run_ranks(world, _evaluated, parallel, microbatches, kinds, with_context=False):
        assert [tokens for _, tokens in found] == [TOKENS] * 3 * len(kinds)
        assert [loss for loss, _ in found] == pytest.approx([alone] * 3 * len(kinds), rel=1e-13)


def test_one_process_is_the_mean_over_the_samples(alone: float) -> None:
    def body(rank: int) -> tuple[float, float]:
        engine = engine_of({}, 1, "dataset")
        sums = [engine.eval_step({k: v[None] for k, v in Samples()[index].items()}) for index in range(SAMPLES)]
        return sum(each.loss_sum for each in sums), sum(each.count for each in sums)

    loss_sum, count = run_ranks(1, body, with_context=False)[0]
    assert (loss_sum / count, count) == (pytest.approx(alone, rel=1e-13), TOKENS)
