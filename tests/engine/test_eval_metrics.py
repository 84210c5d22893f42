"""What an evaluation reports beside the loss: sums over the data, the same under every plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset

import colossus

VIT: dict[str, Any] = dict(
    type="ViT", num_layers=2, hidden_size=24, num_heads=12, image_size=(4, 6), patch_size=(2, 3), in_channels=1,
    num_classes=5,
)  # fmt: skip
SAMPLES = 17


class Images(Dataset[Any]):
    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(1, 4, 6, generator=generator), index * 3 % 5


def config_of(parallel: dict[str, Any], microbatches: int = 1, **train: Any) -> dict[str, Any]:
    return dict(
        parallel=parallel,
        schedule=dict(microbatches=microbatches),
        model=VIT,
        data={"type": Images, "count": 24, "validation": {"type": Images}},
        train=dict(steps=2, global_batch_size=12, precision="fp64", eval_every=2, seed=4, **train),
        device="cpu",
    )


#: name -> ranks, parallel, microbatches; 17 samples in batches of 12 and 5, which are repeated where they do not divide
PLANS: dict[str, tuple[int, dict[str, Any], int]] = {
    "data": (4, dict(data=4), 1),
    "pipeline": (4, dict(pipeline=2, data=2), 3),
    "1d": (4, dict(tensor=dict(size=4, sequence_sharded=True)), 1),
    "2d": (4, dict(tensor=dict(mode="2d", size=4)), 2),
    "3d": (4, dict(tensor=dict(mode="3d", shape=(2, 1, 2))), 1),
}


def _evaluated(
    rank: int, cases: list[tuple[dict[str, Any], int]]
) -> list[tuple[dict[str, float], float, dict[str, Any]]]:
    found = []
    for parallel, microbatches in cases:
        engine = colossus.initialize(config_of(parallel, microbatches))
        summary, result = engine.evaluate(), engine.eval_step(_first(engine))
        found.append((dict(summary.metrics), summary.loss, dict(result.sums)))
        engine.close()
    return found


def _first(engine: Any) -> Any:
    return next(iter(engine.eval_loader))


def test_every_plan_counts_every_image_once() -> None:
    ((alone, loss, first),) = run_ranks(1, _evaluated, [({}, 1)], with_context=False)[0]
    assert first["accuracy"][1] == 12
    assert alone["accuracy"] * SAMPLES == pytest.approx(_right_by_hand(), abs=1e-12)
    assert 0 < alone["accuracy"] < 1
    cases = [case[1:] for case in PLANS.values()]
    for found in run_ranks(4, _evaluated, cases, with_context=False):
        for name, (metrics, its_loss, its_first) in zip(PLANS, found, strict=True):
            assert metrics == pytest.approx(alone, abs=1e-12), name
            assert its_loss == pytest.approx(loss, rel=1e-12), name
            assert its_first["accuracy"] == pytest.approx(first["accuracy"], abs=1e-12), name


def _right_by_hand() -> int:
    def body(rank: int) -> int:
        engine = colossus.initialize(config_of({}))
        images, labels = torch.utils.data.default_collate([Images()[index] for index in range(SAMPLES)])
        return int((engine.model(images.double()).argmax(-1) == labels).sum())

    return int(run_ranks(1, body, with_context=False)[0])


class Own(nn.Module):
    """A user's own model, whose metrics weigh their samples."""

    def __init__(self, metrics: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 3)
        self.eval_metrics = metrics

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(images.flatten(1))

    def loss(self, outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        return outputs.square().sum(), len(outputs)


def _of_own(rank: int, metrics: Any) -> Any:
    config = {**config_of({}), "model": None}
    engine = colossus.initialize(config, model=lambda: Own(metrics))
    engine.train_step(_first(engine))
    return dict(engine.evaluate().metrics)


def test_a_users_own_model_has_some() -> None:
    metrics = {
        "weighed": lambda outputs, batch: (batch[1].sum() * 2.0, 0.5 * len(outputs)),
        "of nothing": lambda outputs, batch: (outputs.new_zeros(()), 0),
    }
    found = run_ranks(1, _of_own, metrics, with_context=False)[0]
    assert found["weighed"] == pytest.approx(sum(index * 3 % 5 for index in range(SAMPLES)) * 4 / SAMPLES)
    assert found["of nothing"] != found["of nothing"]
