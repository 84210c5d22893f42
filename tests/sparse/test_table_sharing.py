"""Tables that several modules look up in, that something else computes with, that are frozen, or compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.tables import SAMPLES, Run, batch_of, loss_fn, train
from torch import Tensor, nn

from colossus import layers

ROWS, DIM = 37, 6


class Shared(nn.Module):
    """Two modules of one table, a table that is the weight of a linear layer, too, and a frozen one."""

    def __init__(self, kind: Any = layers) -> None:
        super().__init__()
        self.first, self.second = kind.Embedding(ROWS, DIM, sparse=True), kind.Embedding(ROWS, DIM, sparse=True)
        self.second.weight = self.first.weight
        self.tied, self.head = nn.Embedding(ROWS, DIM, sparse=True), nn.Linear(DIM, ROWS)
        self.head.weight = self.tied.weight
        self.frozen = kind.Embedding(ROWS, DIM, sparse=True)
        self.frozen.weight.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids[:, 1:]
        x = self.first(ids) * self.second(ids // 2) + self.tied(ids // 3) + self.frozen(ids)
        return self.head(x.tanh().mean(1))


def config_of(data: int, way: str) -> dict[str, Any]:
    strategy = dict(type="hybrid", ways={"first.weight": way}) if data > 1 else dict(type="all_reduce")
    return dict(
        parallel=dict(data=data, strategy=strategy),
        optimizer=dict(type="AdamW", lr=0.05, weight_decay=0.1),
        train=dict(steps=4, global_batch_size=SAMPLES, precision="fp64", seed=5),
        device="cpu",
    )


@pytest.mark.parametrize("world", [1, 3])
def test_shared_tied_and_frozen_tables_are_one_process(world: int) -> None:
    """What another module computes with, too, is dense: all of its rows are touched."""

    def body(rank: int) -> dict[str, Run]:
        ways = ("dense", "gather", "owners") if world > 1 else ("dense",)
        return {way: train(config_of(world, way), model=Shared) for way in ways}

    for runs in run_ranks(world, body, with_context=False):
        for way, run in runs.items():
            compare(run, way)


def compare(run: Run, way: str) -> None:
    model = Shared(nn).double()
    model.load_state_dict(run.weights[0])
    table = torch.optim.SparseAdam([model.first.weight], lr=0.05)
    others = torch.optim.AdamW([model.tied.weight, model.head.bias], lr=0.05, weight_decay=0.1)
    for step in range(4):
        batch = batch_of(step)
        for param in model.parameters():
            param.grad = None
        total, count = loss_fn(model(batch[0]), batch)
        (total / count).backward()
        assert not model.tied.weight.grad.is_sparse
        table.step()
        others.step()
        assert run.losses[step] == pytest.approx((total / count).item(), rel=1e-10)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(
                run.weights[step + 1][name], value, rtol=1e-10, atol=1e-10, msg=f"{way}: {name} after step {step}"
            )
    assert torch.equal(run.weights[-1]["frozen.weight"], run.weights[0]["frozen.weight"])


class Compiled(nn.Module):
    """A forward that a compiler breaks up around its lookups."""

    def __init__(self, is_compiled: bool) -> None:
        super().__init__()
        self.first, self.second = layers.Embedding(ROWS, DIM, sparse=True), nn.Embedding(ROWS, DIM, sparse=True)
        self.head, self.is_compiled = nn.Linear(DIM, ROWS), is_compiled

    def compute(self, ids: Tensor) -> Tensor:
        return self.head((self.first(ids) * self.second(ids // 2)).tanh().mean(1))

    def forward(self, ids: Tensor) -> Tensor:
        run = torch.compile(self.compute, backend="aot_eager") if self.is_compiled else self.compute
        return run(ids[:, 1:])


@pytest.mark.long
def test_a_compiled_forward_is_the_same_run() -> None:
    def body(rank: int) -> list[Run]:
        return [train(config_of(2, "owners"), model=lambda c=c: Compiled(c)) for c in (False, True)]

    for eager, compiled in run_ranks(2, body, with_context=False):
        assert compiled.losses == pytest.approx(eager.losses, rel=1e-12)
        for name, value in eager.weights[-1].items():
            torch.testing.assert_close(compiled.weights[-1][name], value, rtol=1e-12, atol=1e-12)
