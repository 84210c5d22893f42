"""Everything that looks up rows, ours and torch's, trained under plans, against plain torch in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.long import but
from helpers.ranks import RankError, run_ranks
from helpers.sampled import drawn_in, sampled_loss
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.state.model_state_dict import full_state_dict

ROWS, DIM, CLASSES, SAMPLES, LENGTH, BAG, SEED, STEPS = 37, 8, 41, 8, 4, 3, 3, 4
LR, CLIP, NEGATIVES = 2.0, 0.9, 9


class Scaled(nn.Embedding):
    """A user's own forward."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 0.5


class Net(nn.Module):
    def __init__(self, embedding: Any, bag: Any, head: nn.Module | None) -> None:
        super().__init__()
        self.table = embedding(ROWS, DIM, 2, sparse=True)
        self.scaled = Scaled(ROWS, DIM, sparse=True)
        self.largest = bag(ROWS, DIM, mode="max", sparse=bag is not nn.EmbeddingBag)
        self.weighted = bag(ROWS, DIM, mode="sum", padding_idx=0, sparse=True)
        self.mean = nn.EmbeddingBag(ROWS, DIM, sparse=True)
        self.rate = nn.Embedding(ROWS, 1, sparse=True)
        self.mix = nn.Linear(DIM, DIM)
        self.head = head

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        ids, bags = inputs["ids"], inputs["bags"]
        flat = bags.reshape(-1, BAG)
        weights = torch.tanh(self.rate(flat)).squeeze(-1)
        x = self.largest(flat) + self.weighted(flat, per_sample_weights=weights) + self.mean(flat)
        x = x.reshape(*ids.shape, DIM) + self.table(ids.int()) + self.scaled(ids)
        return torch.tanh(self.mix(x))

    def loss(self, x: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return self.head(x, batch["labels"])


Ours = partial(Net, layers.Embedding, layers.EmbeddingBag)


def ours() -> Net:
    return Ours(layers.SampledSoftmax(DIM, CLASSES, NEGATIVES))


def batches() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    out = []
    for _ in range(STEPS):
        ids = torch.randint(0, ROWS, (SAMPLES, LENGTH), generator=generator)
        bags = torch.randint(0, ROWS // 2, (SAMPLES, LENGTH, BAG), generator=generator)
        labels = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=generator)
        bags[0, 1] = 0  # padding alone
        labels[:3, 1:] = -100
        labels[3] = -100  # a microbatch of a rank without a label
        out.append({"inputs": {"ids": ids, "bags": bags}, "labels": labels})
    return out


def train(rank: int, plan: dict[str, Any], microbatches: int) -> dict[str, Any]:
    config = dict(
        parallel=plan,
        optimizer=dict(type="SGD", lr=LR),
        schedule=dict(microbatches=microbatches),
        train=dict(steps=STEPS, global_batch_size=SAMPLES, precision="fp64", clip_grad_norm=CLIP, seed=SEED),
    )
    engine = colossus.initialize(config, model=ours)
    numbers: dict[str, Any] = {}
    if engine.context.grid.world_size == 1:
        numbers["start"] = {
            name: value.clone() for name, value in full_state_dict(engine.model, engine.context).items()
        }
    index, share = engine.context.index("data"), SAMPLES // engine.context.size("data")
    own = slice(index * share, (index + 1) * share)
    for number, batch in enumerate(batches()):
        mine = {"inputs": {key: value[own] for key, value in batch["inputs"].items()}, "labels": batch["labels"][own]}
        result = engine.train_step(mine)
        numbers[f"loss {number}"], numbers[f"norm {number}"] = result.loss, result.grad_norm
    engine.model.eval()
    numbers["evaluated"] = engine.eval_step(mine).loss
    engine.close()
    return numbers


def train_plain(start: dict[str, Tensor]) -> dict[str, float]:
    """torch's modules and loop."""
    model = Net(nn.Embedding, nn.EmbeddingBag, None).double()
    model.load_state_dict(start, strict=False)
    weight, bias = (nn.Parameter(start[f"head.{leaf}"].clone()) for leaf in ("weight", "bias"))
    params = [*model.parameters(), weight, bias]
    numbers = {}
    for number, batch in enumerate(batches()):
        drawn = drawn_in(number, NEGATIVES, CLASSES, seed=SEED)
        loss = sampled_loss(model(batch["inputs"]), batch["labels"], weight, bias, drawn) / (batch["labels"] >= 0).sum()
        for param in params:
            param.grad = None
        loss.backward()
        grads = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in params]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        numbers[f"loss {number}"], numbers[f"norm {number}"] = loss.item(), norm.item()
        with torch.no_grad():
            for param, grad in zip(params, grads, strict=True):
                param -= LR * min(1.0, CLIP / (norm.item() + 1e-6)) * grad
    with torch.no_grad():
        x, labels = model(batch["inputs"]).flatten(0, 1), batch["labels"].flatten()
        numbers["evaluated"] = F.cross_entropy(x @ weight.t() + bias.squeeze(1), labels).item()
    return numbers


def hybrid(way: str, **plan: Any) -> dict[str, Any]:
    return dict(strategy=dict(type="hybrid", ways={"*": way}), **plan)


PLANS: dict[str, tuple[int, dict[str, Any], int]] = {
    "one process": (1, {}, 2),
    "owners": (2, hybrid("owners", data=2), 4),
    "gather": (2, hybrid("gather", data=2), 2),
    "dense": (2, hybrid("dense", data=2), 1),
    "all_reduce": (2, dict(data=2), 2),
    "2d": (4, hybrid("owners", tensor=dict(mode="2d", size=4)), 1),
    "3d": (4, hybrid("owners", tensor=dict(mode="3d", size=4, shape=[2, 1, 2])), 2),
    "1d, data": (4, hybrid("owners", data=2, tensor=dict(mode="1d", size=2, sequence_sharded=True)), 2),
    "2.5d, data": (8, hybrid("owners", data=2, tensor=dict(mode="2.5d", size=4, depth=1)), 2),
    "sequence": (4, hybrid("owners", data=2, sequence=2), 2),
}
RARE = ("dense", "1d, data", "2.5d, data", "gather")


@pytest.fixture(scope="module")
def plain() -> dict[str, float]:
    return train_plain(run_ranks(1, train, {}, 1, with_context=False)[0].pop("start"))


@pytest.mark.rest("2d", "sequence", "3d")
@pytest.mark.parametrize("name", but(RARE, PLANS))
def test_rows_are_trained_as_in_plain_torch(name: str, plain: dict[str, float]) -> None:
    world, plan, microbatches = PLANS[name]
    for numbers in run_ranks(world, train, plan, microbatches, with_context=False):
        numbers.pop("start", None)
        assert numbers == pytest.approx(plain, rel=1e-11, abs=1e-12)


class Refused(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table, self.bag = kind, nn.Embedding(ROWS, DIM, sparse=True), layers.EmbeddingBag(ROWS, DIM)
        self.plain_bag = nn.EmbeddingBag(ROWS, DIM, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        if self.kind in ("bag", "plain_bag"):
            return x + getattr(self, self.kind)(ids).unsqueeze(1)
        return x if self.kind == "penalty" else F.linear(x, self.table.weight)

    def loss(self, x: Tensor, batch: Any) -> tuple[Tensor, int]:
        return x.sum() + (x.shape[0] * self.table.weight.square().sum() if self.kind == "penalty" else 0), x.shape[0]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("bag", r"bag \(EmbeddingBag\): under parallel\.sequence .* and so would have a part of each bag"),
        ("plain_bag", "EmbeddingBag: under parallel.sequence a rank has a part of the tokens"),
        ("penalty", r"table\.weight has sparse=True, but something else than a lookup gave it a gradient"),
        ("head", r"table\.weight has sparse=True, but something else than a lookup gave it a gradient"),
    ],
    ids=["bag", "plain_bag", "penalty", "head"],
)
def test_what_is_not_there(kind: str, words: str) -> None:
    plan = dict(sequence=2) if "bag" in kind else dict(data=2)
    config = dict(
        parallel=dict(strategy=dict(type="hybrid", ways={"*": "gather"}), **plan),
        optimizer=dict(type="SGD", lr=0.1),
        train=dict(steps=1, global_batch_size=4),
    )

    def body(rank: int) -> None:
        engine = colossus.initialize(config, model=lambda: Refused(kind))
        engine.train_step(torch.zeros(4 // plan.get("data", 1), LENGTH, dtype=torch.int64))

    with pytest.raises(RankError, match=words):
        run_ranks(2, body, with_context=False)
