"""`train.batch_dims`: entries of a batch whose dim 0 is not the samples, under every way to cut a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.long import but
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus.data.batch import SampleDims, batch_size_of, slice_batch

BATCH, TOKENS, WIDTH, STEPS = 4, 8, 4, 2
DIMS = {"position_ids": 1, "table": None, "weights": 1}


class Multimodal(nn.Module):
    """Rotations by three kinds of positions, and a table that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(11, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, input_ids: Tensor, position_ids: Tensor, table: Tensor) -> Tensor:
        angle = (position_ids * table[: len(position_ids), :1, None]).sum(0)
        x = self.embed(input_ids) * angle[..., None].cos()
        for block in self.body:
            x = x + block(x).tanh()
        return x


def batch_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(11, (BATCH, TOKENS), generator=generator)
    positions = torch.randint(5, (3, BATCH, TOKENS), generator=generator)
    table = torch.rand(5, 5, generator=generator)
    weights = torch.rand(2, BATCH, TOKENS, generator=generator)
    return {"inputs": {"input_ids": ids, "position_ids": positions, "table": table}, "weights": weights}


class Batches:
    """Ready batches, which are the same on all ranks."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(batch_of, self.steps)


def loss_fn(x: Tensor, batch: dict[str, Any]) -> tuple[Tensor, int]:
    loss = (x.square().sum(-1) * batch["weights"][0]).sum()
    return loss, batch["inputs"]["input_ids"].numel()


PLANS: dict[str, dict[str, Any]] = {
    "one": dict(parallel=dict(data=1), schedule=dict(microbatches=2)),
    "pipeline": dict(parallel=dict(pipeline=2), schedule=dict(type="1f1b", microbatches=2)),
    "data": dict(parallel=dict(data=2), schedule=dict(microbatches=2)),
    "sequence": dict(parallel=dict(sequence=2), schedule=dict(microbatches=2)),
    "2d": dict(parallel=dict(tensor=dict(mode="2d", size=4))),
}


def run(name: str) -> list[float]:
    config = PLANS[name] | dict(
        optimizer=dict(type="SGD", lr=0.05),
        train=dict(global_batch_size=BATCH, precision="fp64", seed=3, batch_dims=DIMS),
        device="cpu",
    )
    make = colossus.parallelize(Multimodal, example=batch_of(0)["inputs"])
    data = dict(type=lambda: Batches(*range(STEPS)), validation=Batches(STEPS))
    engine = colossus.initialize(config, model=make, loss_fn=loss_fn, data=data)
    losses = [engine.train_step(next(engine.loader)).loss for _ in range(STEPS)]
    losses.append(engine.evaluate().loss)
    engine.close()
    return losses


@pytest.mark.parametrize("name", but(["2d", "sequence"], [name for name in PLANS if name != "one"]))
def test_a_plan_cuts_each_entry_by_its_samples(name: str) -> None:
    (alone,) = run_ranks(1, lambda rank: run("one"), with_context=False)
    assert alone[0] != pytest.approx(alone[1], rel=1e-3)
    for losses in run_ranks(4 if name == "2d" else 2, lambda rank: run(name), with_context=False):
        assert losses == pytest.approx(alone, rel=1e-10)


def test_samples_first_and_back() -> None:
    batch, dims = batch_of(0), SampleDims(DIMS)
    with pytest.raises(ValueError, match=r"differ in dim 0.*position_ids.*train\.batch_dims says which dim"):
        batch_size_of(batch)
    first = dims.first(batch)
    assert batch_size_of(first) == BATCH
    assert list(first["weights"].shape) == [BATCH, TOKENS, 2]
    part = dims.restored(slice_batch(first, 1, 3))
    assert torch.equal(part["weights"], batch["weights"][:, 1:3])
    assert torch.equal(part["inputs"]["table"], batch["inputs"]["table"])
    assert dims.restored((first,))[0]["weights"].equal(batch["weights"])
    with pytest.raises(ValueError, match=r"train\.batch_dims: 'weights' of a batch has no dim 1: it is of shape \[4\]"):
        dims.first({"weights": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"no entry 'position_idz'; did you mean 'position_ids'\?"):
        SampleDims({"position_idz": 1}).first(batch)
    with pytest.raises(ValueError, match=r"batch_dims"):
        colossus.initialize(
            dict(train=dict(batch_dims={"x": -1}), parallel=dict(data=1)), model=Multimodal, loss_fn=loss_fn
        )
