"""Classes derived from torch's: batch norms take the statistics of all ranks, linears that only rename are linears."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.long import long
from helpers.ranks import run_ranks
from helpers.user_models.cases import BATCH, WIDTH, UserModel, classify, features, integers
from helpers.user_models.table import fill, twins
from helpers.user_models.unchanged import unchanged
from torch import Tensor, nn

import colossus
from colossus.context.parallel_context import ParallelContext
from colossus.convert.parallelize import conversion_of


class Renamed(nn.BatchNorm1d):
    """With another default, and a value of its class."""

    group = "norms"

    def __init__(self, width: int) -> None:
        super().__init__(width, momentum=0.3)


class Activated(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x)) + 0.1 * x


class Copied(nn.BatchNorm1d):
    """As timm's: the forward of its base, written out."""

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        of_batch = self.training or self.running_mean is None
        tracked = not self.training or self.track_running_stats
        used = (self.running_mean, self.running_var) if tracked else (None, None)
        return F.batch_norm(x, *used, self.weight, self.bias, of_batch, factor, self.eps).relu()


class Twice(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x) * 3.0)


class ByHand(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0) + self.eps).sqrt()


class Normed(nn.Module):
    def __init__(self, norm: type[nn.Module], *arguments: Any) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(WIDTH, WIDTH), norm(WIDTH, *arguments), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.first(x)))


def normed(name: str, *arguments: Any, **options: Any) -> UserModel:
    kind = globals()[name]
    example = torch.zeros(2, WIDTH)
    return unchanged(
        f"{name} {arguments}", lambda: Normed(kind, *arguments), features, classify, example=example, steps=3, **options
    )


NORMS = [
    normed("Renamed"), normed("Activated"), normed("Copied"), normed("Twice"),
    normed("Activated", 1e-3, None), normed("Copied", 1e-5, 0.1, False, False),
]  # fmt: skip


@pytest.mark.parametrize("plan", ["data 2", *long("data 2 zero 3", "2d 4")])
def test_batch_norms_take_the_statistics_of_all_ranks(plan: str) -> None:
    for cell in fill(NORMS, [plan], twins(NORMS)):
        assert cell.outcome == "equal", f"{cell.model}: {cell.words}"


def _recomputed(rank: int) -> list[tuple[int, Tensor]]:
    """The count of batches and the running mean with and without recomputation."""
    found = []
    for kind in (None, "full"):
        checkpoint = kind and dict(type=kind, modules=["norm"])
        train = dict(global_batch_size=BATCH, precision="fp64", activation_checkpoint=checkpoint)
        config = dict(parallel=dict(data=2), train={key: each for key, each in train.items() if each}, device="cpu")
        make = colossus.parallelize(lambda: Normed(Activated), example=torch.zeros(2, WIDTH))
        engine = colossus.initialize(config, model=make, loss_fn=classify)
        batch = features(0)
        engine.train_step({key: each[4 * rank :][:4] for key, each in batch.items()})
        norm: Any = engine.model.norm
        found.append((int(norm.num_batches_tracked), norm.running_mean.clone()))
        engine.close()
    return found


def test_a_recomputation_changes_no_running_statistics() -> None:
    (count, mean), (other_count, other) = run_ranks(2, _recomputed, with_context=False)[0]
    assert count == other_count == 1
    assert torch.equal(mean, other)


def test_batch_norms_that_are_refused() -> None:
    by_hand = normed("ByHand", refused={"data 2": "norm (ByHand) derives from nn.BatchNorm, but does not call"})
    for cell in fill([by_hand], ["data 2"], {}):
        assert cell.outcome == "refused", cell.words

    def body(context: ParallelContext) -> str:
        kind = type("Mine", (nn.SyncBatchNorm,), {"forward": lambda self, x: x})
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            colossus.build(colossus.parallelize(lambda: Normed(kind)), context)
        return str(caught.value)

    assert "norm (Mine) derives from nn.SyncBatchNorm" in run_ranks(1, body)[0]


# -- linears ----------------------------------------------------------------------------------------------------


class Product(nn.Linear):
    """As Falcon's."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = x @ self.weight.T
        return hidden if self.bias is None else hidden + self.bias


class Marked(nn.Linear):
    scale = 3.0

    def __init__(self, *sizes: int, kind: str = "mine") -> None:
        super().__init__(*sizes)
        self.kind = kind


class Words(nn.Embedding):
    pass


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2.0


class Clamped(nn.Linear):
    """The same on small numbers alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-100.0, 100.0))


class Merging(nn.Linear):
    def merged(self) -> Tensor:
        return self.weight * 2.0


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = Words(11, WIDTH)
        self.product, self.marked = Product(WIDTH, WIDTH, bias=False), Marked(WIDTH, WIDTH)
        self.doubled, self.clamped, self.merging = (kind(WIDTH, WIDTH) for kind in (Doubled, Clamped, Merging))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.out = Product(WIDTH, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.marked(torch.relu(self.product(self.words(ids)))) * self.marked.scale
        x = x + self.attention(x, x, x)[0]
        x = x + F.linear(x, self.merging.merged())
        return self.out(self.clamped(self.doubled(x)))


def linears_body(context: ParallelContext) -> dict[str, tuple[str, str]]:
    make = colossus.parallelize(Linears, example=torch.ones(2, 4, dtype=torch.long))
    conversion = conversion_of(colossus.build(make, context))
    assert conversion is not None
    return {name: (each.became, each.why) for name, each in conversion.swaps.items()}


def test_linears_that_only_rename_are_linears() -> None:
    own = "its class has a forward of its own"
    assert run_ranks(2, linears_body)[0] == {
        "words": ("Embedding", ""),
        "product": ("Linear(column)", ""),
        "marked": ("Linear(row)", ""),
        "doubled": ("", own),
        "clamped": ("", own),
        "merging": ("", "its class has a merged of its own"),
        "attention.out_proj": ("", "nn.MultiheadAttention reads its weight itself"),
        "out": ("Linear", "out_features = 11 does not divide over the 2 ranks of tensor; 10 or 12 does"),
    }


def _tokens(step: int) -> dict[str, Any]:
    return {"inputs": integers(step, 11, BATCH, 4), "labels": integers(step + 1, 11, BATCH, 4)}


@pytest.mark.parametrize("plan", ["1d 2", *long("data 2 zero 3", "2d 4")])
def test_and_compute_what_they_did(plan: str) -> None:
    example = torch.ones(2, 4, dtype=torch.long)
    linears = unchanged("linears", Linears, _tokens, classify, example=example)
    for cell in fill([linears], [plan], twins([linears])):
        assert cell.outcome == "equal", f"{cell.plan}: {cell.words}"
