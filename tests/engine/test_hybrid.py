"""Tables of embeddings with sparse gradients, against plain torch in one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus import layers

ROWS, DIM, CLASSES, SAMPLES, LENGTH = 37, 6, 5, 8, 3


class Shifted(nn.Embedding):
    """With a parameter of a user's own beside the table."""

    def __init__(self) -> None:
        super().__init__(ROWS, DIM, sparse=True)
        self.bias = nn.Parameter(torch.zeros(DIM))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.bias


class Words(nn.Module):
    """
    Args:
        everywhere: all ranks look up in ``rare``, be it no id; else those that have ids for it.
    """

    def __init__(self, everywhere: bool) -> None:
        super().__init__()
        self.table = layers.Embedding(ROWS, DIM, padding_idx=2, sparse=True)
        self.plain = Shifted()
        self.rare, self.everywhere = nn.Embedding(ROWS, DIM, sparse=True), everywhere
        self.out = layers.Linear(DIM, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.table(ids) + self.plain(ids.int() // 2)).mean(1)
        (samples,) = (ids[:, 0] >= 34).nonzero(as_tuple=True)
        if self.everywhere or len(samples):
            x = x.index_add(0, samples, self.rare(ids[samples, 0].int()).to(x.dtype))
        return self.out(x)


def loss_fn(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randint(0, ROWS, (SAMPLES, LENGTH), generator=generator),
            torch.randint(0, CLASSES, (SAMPLES,), generator=generator),
        )
        for _ in range(4)
    ]


def train(rank: int, data: int, way: str, microbatches: int, clip: float | None) -> dict[str, Tensor]:
    strategy = dict(type="hybrid", ways={"*": way}) if data > 1 else dict(type="all_reduce")
    config = dict(
        parallel=dict(data=data, strategy=strategy),
        optimizer=dict(type="SGD", lr=0.5),
        schedule=dict(microbatches=microbatches),
        train=dict(steps=4, global_batch_size=SAMPLES, precision="fp64", clip_grad_norm=clip),
    )
    engine = colossus.initialize(config, model=lambda: Words(way == "owners"), loss_fn=loss_fn)
    share = SAMPLES // data
    index = engine.context.index("data")
    found = {}
    for number, batch in enumerate(batches()):
        result = engine.train_step(tuple(each[index * share : (index + 1) * share] for each in batch))
        found[f"loss {number}"] = torch.tensor(result.loss, dtype=torch.float64)
        found[f"norm {number}"] = torch.tensor(result.grad_norm, dtype=torch.float64)
    engine.close()
    return found


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("way", ["dense", "gather", "owners"])
def test_a_table_is_trained_as_in_one_process(way: str, clip: float | None) -> None:
    expected = run_ranks(1, train, 1, way, 1, clip, with_context=False)[0]
    for found in run_ranks(2, train, 2, way, 2, clip, with_context=False):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)
