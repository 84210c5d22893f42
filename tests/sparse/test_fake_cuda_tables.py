"""Whole steps of tables by rows, on CUDA devices that do not exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.fake_cuda import Waits, batch_on_device, files_of, run_fake_ranks
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.comm import uneven
from colossus.context.groups import AxisGroup
from colossus.sparse.owners import RowExchange


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = layers.Embedding(37, 6, sparse=True)
        self.bag = layers.EmbeddingBag(41, 6, sparse=True)
        self.out = nn.Linear(6, 5)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.out(self.first(ids).mean(1) + self.bag(ids))
        return out


def loss_fn(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)


def mirror() -> None:
    """Each of the others sends what this rank sends it, and all that is sent goes to the first: numbers that decide
    about sizes would come from a device, and are not there."""
    agree, by_target = uneven.agree, RowExchange._by_target

    def mirrored(
        sent: Sequence[int], group: AxisGroup, device: torch.device, words: Sequence[int] = ()
    ) -> tuple[uneven.Lengths, list[list[int]]]:
        agree(sent, group, device, words)
        return uneven.Lengths(tuple(sent), tuple(sent), (tuple(sent),) * group.size), [list(words)] * group.size

    def to_the_first(self: RowExchange, number: int, table: Any, ids: Tensor) -> tuple[Tensor, list[int]]:
        order, counts = by_target(self, number, table, ids)
        return order, [len(ids)] + [0] * (len(counts) - 1)

    uneven.agree = mirrored  # type: ignore[assignment]
    RowExchange._by_target = to_the_first  # type: ignore[method-assign]


def steps(rank: int, strategies: list[dict[str, Any]], precision: str) -> list[list[set[str]]]:
    """Of each strategy and each step from the second on: the files that wait."""
    mirror()
    found = []
    for strategy in strategies:
        config = dict(
            parallel=dict(data=4, strategy=dict(strategy)),
            optimizer=dict(type="AdamW", tables=dict(type="Adagrad", lr=0.1)),
            train=dict(steps=9, global_batch_size=16, precision=precision),
            device="cuda",
        )
        engine = colossus.initialize(config, model=Net, loss_fn=loss_fn)
        ids, labels = torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
        batch = batch_on_device({"inputs": ids, "labels": labels})
        of_steps = []
        for _ in range(4):
            Waits.begin_step()
            with Waits(allowed=True) as waits:
                engine.train_step(tuple(batch.values()))
            of_steps.append(set(files_of(waits.found)))
        engine.close()
        found.append(of_steps[1:])
    return found


LOOKUP = {"sparse/table.py", "data_parallel/strategy.py"}
WAYS = {
    "dense": LOOKUP,
    "gather": LOOKUP | {"comm/uneven.py", "rows/row_gradient.py"},
    "owners": LOOKUP | {"comm/uneven.py", "rows/row_gradient.py", "sparse/owners.py"},
}


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp16"])
def test_steps_stay_on_the_device_and_wait_where_lengths_depend_on_values(precision: str) -> None:
    strategies = [dict(type="hybrid", ways={"*": way}) for way in WAYS]
    (found,) = run_fake_ranks(4, steps, strategies, precision)
    assert found == [[places] * 3 for places in WAYS.values()]
